"""ViT-B/16 on this machine: our engines against transformers in fp32 and ONNX Runtime's own quantize_dynamic of it.

    python benchmarks/engines.py [--model B/16] [--seconds 120]

The peer's ONNX file is exported from transformers' own model, quantised and run with the library's defaults. Weights
are random, which does not change the arithmetic. All are called in turns; the ratio is the median over rounds. What
int8 can give at all is shown by the model's large products alone, without anything between them. Writes
results/engines.json.
"""

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from harness import interleaved, median_ratio, write_result

import patchword as pw
from patchword.checkpoints import Checkpoint
from patchword.data.preprocess import HALF, Preprocess
from patchword.engines import ENGINES, open_engine
from patchword.engines.auto import select_fastest
from patchword.engines.onnx import open_session, suppress_output

BATCHES = (1, 16)


def transformers_model(config: Any) -> torch.nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=config.embed_dim, num_hidden_layers=config.depth, num_attention_heads=config.num_heads,
            intermediate_size=config.mlp_dim, image_size=config.image_size[0], patch_size=config.patch_size[0],
            num_labels=config.num_classes,
        )
    ).eval()  # fmt: skip


def quantised(model: torch.nn.Module, size: int) -> Any:
    """The peer: torch.onnx of transformers' model, then quantize_dynamic with its defaults."""
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder, suppress_output():
        program = torch.onnx.export(
            model, (torch.randn(2, 3, size, size),), dynamo=True, input_names=["images"], verbose=False,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
        )  # fmt: skip
        proto = program.model_proto  # type: ignore[union-attr]
        del proto.graph.value_info[:]
        quantize_dynamic(proto, f"{folder}/int8.onnx", weight_type=QuantType.QInt8)
        return onnxruntime.InferenceSession(f"{folder}/int8.onnx", providers=["CPUExecutionProvider"])


def products(config: Any, batch: int) -> Callable[[], object]:
    """Runs the large products of the blocks in int8, and nothing else."""
    from onnx import TensorProto, helper, numpy_helper

    wide, hidden, tokens = config.embed_dim, config.mlp_dim, batch * (config.num_patches + config.num_prefix)
    runs = []
    for inner, outer in ((wide, 3 * wide), (wide, wide), (wide, hidden), (hidden, wide)):
        weight = numpy_helper.from_array(np.random.randint(-64, 64, (inner, outer)).astype(np.int8), "weight")
        node = helper.make_node("MatMulInteger", ["x", "weight"], ["y"])
        x = helper.make_tensor_value_info("x", TensorProto.UINT8, [tokens, inner])
        y = helper.make_tensor_value_info("y", TensorProto.INT32, [tokens, outer])
        model = helper.make_model(
            helper.make_graph([node], "product", [x], [y], [weight]),
            ir_version=10,
            opset_imports=[helper.make_opsetid("", 20)],
        )
        session = open_session(model.SerializeToString(), torch.get_num_threads())
        runs.append(partial(session.run, None, {"x": np.random.randint(0, 256, (tokens, inner)).astype(np.uint8)}))

    def run() -> None:
        for _ in range(config.depth):
            for each in runs:
                each()

    return run


def eager(model: torch.nn.Module, images: torch.Tensor) -> None:
    with torch.inference_mode():
        model(images)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="B/16")
    parser.add_argument("--seconds", type=float, default=120.0)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = pw.create_model(args.model)
    torch.nn.init.normal_(model.head.weight, std=0.02)  # type: ignore[arg-type]
    config, size = model.config, model.config.image_size[0]
    checkpoint = Checkpoint(config, dict(model.state_dict()), Preprocess(config.image_size, mean=HALF, std=HALF))
    chosen = select_fastest(checkpoint)
    peer = transformers_model(config)
    session = quantised(peer, size)
    ours = {"auto": chosen.engine, "torch": open_engine("torch", checkpoint)}
    rows = []
    for batch in BATCHES:
        pixels = torch.randint(0, 256, (batch, size, size, 3), dtype=torch.uint8)
        images = torch.randn(batch, 3, size, size)
        jobs: dict[str, Callable[[], object]] = {
            "transformers": partial(eager, peer, images),
            "quantize_dynamic": partial(session.run, None, {"images": images.numpy()}),
            **{name: partial(engine, pixels) for name, engine in ours.items()},
            "int8 products alone": products(config, batch),
        }
        times = interleaved(jobs, args.seconds, least=8)
        for name in jobs:
            speed = batch / float(np.median(times[name]))
            ratios = {other: median_ratio(times[other], times[name]) for other in ("transformers", "quantize_dynamic")}
            rows.append({"batch": batch, "engine": name, "pictures_per_second": speed, "times": ratios})
            said = "  ".join(f"{ratio:.2f}x {other}" for other, ratio in ratios.items())
            print(f"batch {batch:2}  {name:19} {speed:6.2f}/s  {said}", flush=True)
    content = {"command": f"benchmarks/engines.py --model {args.model}", "auto": chosen.prepared.name, "rows": rows}
    content["kind"] = ENGINES[chosen.prepared.name].description
    print(write_result("engines", content))


if __name__ == "__main__":
    main()
