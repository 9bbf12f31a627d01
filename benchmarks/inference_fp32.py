"""Our eager ViT against transformers and vit-pytorch in fp32, with the same weight shapes, in one run.

    .venv/bin/python benchmarks/inference_fp32.py            # alone on the machine, about five minutes

Prints images per second (median over rounds) and how many times as fast ours is (median of the rounds' ratios).
"""

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from harness import interleaved, matmul_peak, median_ratio, write_result
from transformers import ViTConfig as TheirConfig
from transformers import ViTForImageClassification

import patchword as pw

SIZES = {"Ti/16": (192, 12, 3), "B/16": (768, 12, 12)}


def vit_pytorch_class() -> type:
    """Import vit_pytorch.ViT without its package's __init__, which imports torchvision."""
    package = importlib.util.find_spec("vit_pytorch")
    if package is None or not package.submodule_search_locations:
        sys.exit("vit-pytorch is missing: make .venv/ready")
    path = Path(package.submodule_search_locations[0]) / "vit.py"
    spec = importlib.util.spec_from_file_location("vit_pytorch_vit", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ViT


def models(name: str) -> dict[str, Callable[[torch.Tensor], object]]:
    width, depth, heads = SIZES[name]
    theirs = TheirConfig(hidden_size=width, num_hidden_layers=depth, num_attention_heads=heads, num_labels=1000)
    theirs.intermediate_size = 4 * width
    vit_pytorch = vit_pytorch_class()(
        image_size=224, patch_size=16, num_classes=1000, dim=width, depth=depth, heads=heads, mlp_dim=4 * width
    )
    return {
        "patchword": pw.optimize_for_cpu(pw.create_model(name)).eval(),
        "transformers": ViTForImageClassification(theirs).eval(),
        "vit-pytorch": vit_pytorch.eval(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="for each model and batch size")
    parser.add_argument("--models", nargs="+", default=list(SIZES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    rows = []
    print(f"{'model':8} {'batch':>5} {'library':14} {'images/s':>9} {'ours is':>8}")
    for name in args.models:
        zoo = models(name)
        for batch in args.batches:
            images = torch.randn(batch, 3, 224, 224)
            jobs = {library: (lambda m=model, x=images: m(x)) for library, model in zoo.items()}
            times = interleaved(jobs, args.seconds)
            for library, values in times.items():
                speed = batch / statistics.median(values)
                ratio = median_ratio(values, times["patchword"])
                row = {"model": name, "batch": batch, "library": library, "images_per_second": speed}
                rows.append({**row, "rounds": len(values), "ours_is_times_as_fast": ratio})
                print(f"{name:8} {batch:5} {library:14} {speed:9.2f} {ratio:7.3f}x", flush=True)
    print("wrote", write_result("inference_fp32", {"peak_tflops": matmul_peak(), "rows": rows}))


if __name__ == "__main__":
    main()
