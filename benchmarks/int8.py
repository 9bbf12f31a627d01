"""Accuracy and speed of int8 quantization and token merging, with a real model on real images.

    python benchmarks/int8.py MODEL FOLDER CALIBRATION [--tome-ratio 0.15 0.18 0.22]

FOLDER has labeled images, as for `patchword evaluate`; int8 is calibrated on images of another folder. The baseline is
ONNX Runtime's quantize_dynamic of the same model. Accuracy is measured on all images; speed with batches of 16 on all
cores, interleaved. Writes results/int8.json.
"""

import argparse
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import interleaved, median_ratio, short_path, write_result

from patchword.config import ViTConfig
from patchword.data.formats.image_folder import match_classes
from patchword.data.image_decoder import list_images
from patchword.engines import open_engine
from patchword.engines.engine import Engine
from patchword.engines.exportable import ExportableModel
from patchword.engines.onnx import OnnxSession, export_onnx, suppress_output
from patchword.engines.parity import compute_logits, measure_parity
from patchword.inference.classifier import Classifier
from patchword.inference.inputs import resolve_labeled_images
from patchword.models.token_merging import merge_schedule

NUM_CALIBRATION_IMAGES, BATCH_SIZE = 48, 16
OURS = ("onnx", "onnx-int8", "onnx-int8-tome", "onnx-static", "openvino", "openvino-int8")


def quantize_baseline(model: ExportableModel) -> Engine:
    """Quantize with ONNX Runtime's own defaults."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder, suppress_output():
        quantize_dynamic(export_onnx(model), f"{folder}/int8.onnx", weight_type=QuantType.QInt8)
        return OnnxSession(Path(f"{folder}/int8.onnx").read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("folder")
    parser.add_argument("calibration")
    parser.add_argument("--tome-ratio", type=float, nargs="*", default=[0.12, 0.15, 0.18])
    args = parser.parse_args()
    classifier = Classifier.load(args.model)
    checkpoint = classifier.checkpoint
    images = resolve_labeled_images(args.folder)
    names = sorted({str(each.label) for each in images})
    indices = match_classes(names, checkpoint.labels, checkpoint.config.num_classes)
    targets = torch.tensor([indices[str(each.label)] for each in images])
    pixels = torch.stack([classifier.pixels(each.image) for each in images])
    files = list_images(Path(args.calibration))
    random.Random(0).shuffle(files)
    calibration = torch.stack([classifier.pixels(file) for file in files[:NUM_CALIBRATION_IMAGES]])
    config = checkpoint.config
    assert isinstance(config, ViTConfig)
    engines: dict[str, Engine] = {
        "torch": open_engine("torch", checkpoint),
        "quantize_dynamic": quantize_baseline(ExportableModel(checkpoint)),
        **{name: open_engine(name, checkpoint, calibration) for name in OURS},
        **{
            f"onnx-int8, {ratio:g} merged": open_engine(
                "onnx-int8", checkpoint, calibration, merge_schedule(config, ratio)
            )
            for ratio in args.tome_ratio
        },
    }
    reference = compute_logits(engines["torch"], pixels, BATCH_SIZE)
    times = interleaved({name: lambda e=engine: e(pixels[:BATCH_SIZE]) for name, engine in engines.items()}, 120.0)
    rows: list[dict[str, Any]] = []
    for name, engine in engines.items():
        logits = compute_logits(engine, pixels, BATCH_SIZE)
        parity = measure_parity(reference, logits)
        speed = BATCH_SIZE / statistics.median(times[name])
        top1 = float((logits.argmax(dim=1) == targets).double().mean())
        row = {"top1": top1, "top1_agreement": parity.top1_agreement, "kl_divergence": parity.kl_divergence}
        row["images_per_second"] = speed
        row |= {f"times_{other}": median_ratio(times[other], times[name]) for other in ("torch", "onnx-int8")}
        rows.append({"engine": name, **row})
        print(f"{name:22} " + "  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
    command = f"benchmarks/int8.py {short_path(args.model)} {short_path(args.folder)} {short_path(args.calibration)}"
    print(
        write_result(
            "int8",
            {
                "command": command,
                "num_images": len(pixels),
                "num_calibration_images": NUM_CALIBRATION_IMAGES,
                "rows": rows,
            },
        )
    )


if __name__ == "__main__":
    main()
