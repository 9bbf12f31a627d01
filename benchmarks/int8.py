"""What int8 and fewer tokens cost in accuracy, and what they give in speed, with a real model on real pictures.

    python benchmarks/int8.py MODEL FOLDER CALIBRATION [--merge 0.15 0.18 0.22]

FOLDER has labelled pictures, as for `patchword evaluate`; int8 is calibrated on pictures of another folder. Beside our
engines stands ONNX Runtime's own quantize_dynamic of the same model. Accuracy is of all pictures; speed of batches of
16 on all cores, in turns. Writes results/int8.json.
"""

import argparse
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import interleaved, median_ratio, shown, write_result

from patchword.config import ViTConfig
from patchword.data.formats.image_folder import match_classes
from patchword.data.images import list_images
from patchword.engines import open_engine
from patchword.engines.engine import Engine
from patchword.engines.exportable import ExportableModel
from patchword.engines.onnx import OnnxSession, export_onnx, suppress_output
from patchword.engines.parity import compute_logits, measure_parity
from patchword.inference.classifier import Classifier
from patchword.inference.inputs import resolve_labeled_images
from patchword.models.token_merging import merge_schedule

CALIBRATION, BATCH = 48, 16
OURS = ("onnx", "onnx-int8", "onnx-merged", "onnx-static", "openvino", "openvino-int8")


def theirs(packed: ExportableModel) -> Engine:
    """ONNX Runtime's own way, with its defaults."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder, suppress_output():
        quantize_dynamic(export_onnx(packed), f"{folder}/int8.onnx", weight_type=QuantType.QInt8)
        return OnnxSession(Path(f"{folder}/int8.onnx").read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("folder")
    parser.add_argument("calibration")
    parser.add_argument("--merge", type=float, nargs="*", default=[0.12, 0.15, 0.18])
    args = parser.parse_args()
    classifier = Classifier.load(args.model)
    checkpoint = classifier.checkpoint
    pictures = resolve_labeled_images(args.folder)
    named = match_classes(sorted({str(p.label) for p in pictures}), checkpoint.labels, checkpoint.config.num_classes)
    targets = torch.tensor([named[str(p.label)] for p in pictures])
    pixels = torch.stack([classifier.pixels(p.image) for p in pictures])
    files = list_images(Path(args.calibration))
    random.Random(0).shuffle(files)
    calibration = torch.stack([classifier.pixels(file) for file in files[:CALIBRATION]])
    config = checkpoint.config
    assert isinstance(config, ViTConfig)
    engines: dict[str, Engine] = {
        "torch": open_engine("torch", checkpoint),
        "quantize_dynamic": theirs(ExportableModel(checkpoint)),
        **{name: open_engine(name, checkpoint, calibration) for name in OURS},
        **{
            f"onnx-int8, {part:g} merged": open_engine(
                "onnx-int8", checkpoint, calibration, merge_schedule(config, part)
            )
            for part in args.merge
        },
    }
    reference = compute_logits(engines["torch"], pixels, BATCH)
    times = interleaved({name: lambda e=engine: e(pixels[:BATCH]) for name, engine in engines.items()}, 120.0)
    rows: list[dict[str, Any]] = []
    for name, engine in engines.items():
        said = compute_logits(engine, pixels, BATCH)
        found = measure_parity(reference, said)
        speed = BATCH / statistics.median(times[name])
        top1 = float((said.argmax(dim=1) == targets).double().mean())
        row = {"top1": top1, "same": found.top1_agreement, "divergence": found.kl_divergence, "pictures_per_second": speed}
        row |= {f"times_{other}": median_ratio(times[other], times[name]) for other in ("torch", "onnx-int8")}
        rows.append({"engine": name, **row})
        print(f"{name:22} " + "  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
    command = f"benchmarks/int8.py {shown(args.model)} {shown(args.folder)} {shown(args.calibration)}"
    print(
        write_result("int8", {"command": command, "pictures": len(pixels), "calibrated_on": CALIBRATION, "rows": rows})
    )


if __name__ == "__main__":
    main()
