"""ViT-B/16: our engines against transformers in fp32 and ONNX Runtime's quantize_dynamic of transformers' model.

    python benchmarks/engines.py [--model B/16] [--seconds 120]

The baseline's ONNX file is exported from transformers' own model, quantized and run with the library's defaults.
Weights are random, which does not change the arithmetic. Calls are interleaved; the ratio is the median over rounds.
The large matmuls of the model alone show the upper limit of int8. Writes results/engines.json.
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


def quantize_baseline(model: torch.nn.Module, size: int) -> Any:
    """Export a model with torch.onnx and quantize it by quantize_dynamic with its defaults."""
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


def int8_matmuls(config: Any, batch: int) -> Callable[[], object]:
    """Return a function that runs the large int8 matmuls of all blocks and nothing else."""
    from onnx import TensorProto, helper, numpy_helper

    wide, hidden, tokens = config.embed_dim, config.mlp_dim, batch * (config.num_patches + config.num_prefix)
    matmuls = []
    for inner, outer in ((wide, 3 * wide), (wide, wide), (wide, hidden), (hidden, wide)):
        weight = numpy_helper.from_array(np.random.randint(-64, 64, (inner, outer)).astype(np.int8), "weight")
        node = helper.make_node("MatMulInteger", ["x", "weight"], ["y"])
        x = helper.make_tensor_value_info("x", TensorProto.UINT8, [tokens, inner])
        y = helper.make_tensor_value_info("y", TensorProto.INT32, [tokens, outer])
        model = helper.make_model(
            helper.make_graph([node], "matmul", [x], [y], [weight]),
            ir_version=10,
            opset_imports=[helper.make_opsetid("", 20)],
        )
        session = open_session(model.SerializeToString(), torch.get_num_threads())
        matmuls.append(partial(session.run, None, {"x": np.random.randint(0, 256, (tokens, inner)).astype(np.uint8)}))

    def run() -> None:
        for _ in range(config.depth):
            for matmul in matmuls:
                matmul()

    return run


def run_eager(model: torch.nn.Module, images: torch.Tensor) -> None:
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
    selected = select_fastest(checkpoint)
    baseline = transformers_model(config)
    session = quantize_baseline(baseline, size)
    ours = {"auto": selected.engine, "torch": open_engine("torch", checkpoint)}
    rows = []
    for batch in BATCHES:
        pixels = torch.randint(0, 256, (batch, size, size, 3), dtype=torch.uint8)
        images = torch.randn(batch, 3, size, size)
        jobs: dict[str, Callable[[], object]] = {
            "transformers": partial(run_eager, baseline, images),
            "quantize_dynamic": partial(session.run, None, {"images": images.numpy()}),
            **{name: partial(engine, pixels) for name, engine in ours.items()},
            "int8 matmuls alone": int8_matmuls(config, batch),
        }
        times = interleaved(jobs, args.seconds, min_rounds=8)
        for name in jobs:
            speed = batch / float(np.median(times[name]))
            ratios = {other: median_ratio(times[other], times[name]) for other in ("transformers", "quantize_dynamic")}
            rows.append({"batch": batch, "engine": name, "images_per_second": speed, "times": ratios})
            ratios_text = "  ".join(f"{ratio:.2f}x {other}" for other, ratio in ratios.items())
            print(f"batch {batch:2}  {name:19} {speed:6.2f}/s  {ratios_text}", flush=True)
    content = {"command": f"benchmarks/engines.py --model {args.model}", "auto": selected.prepared.name, "rows": rows}
    content["kind"] = ENGINES[selected.prepared.name].description
    print(write_result("engines", content))


if __name__ == "__main__":
    main()
