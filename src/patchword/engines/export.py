"""Export of a model to a file that runs without patchword: ONNX, torch.export or OpenVINO."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..checkpoints import Checkpoint
from ..core.text import one_line
from ..errors import ConfigError, ExportError, PatchwordError, how_to_install
from .engine import ENGINES, Engine
from .exportable import ExportableModel, example_inputs
from .parity import sample_images

FORMATS = {".onnx": "onnx", ".pt2": "torch.export", ".xml": "openvino"}


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        int8: Quantize the matmuls to int8.
        include_preprocessing: Resize and crop in the graph, and return probabilities: images of any size in.
        merge_counts: Patches to merge in each block (ToMe).
    """

    int8: bool = False
    include_preprocessing: bool = False
    merge_counts: Sequence[int] = ()

    @property
    def exact(self) -> bool:
        """Whether logits may differ from the model's by rounding only."""
        return not self.int8 and not any(self.merge_counts) and not self.include_preprocessing


def check_format(out: Path, options: ExportOptions) -> str:
    """Return the format that the extension of `out` stands for.

    Raises:
        ConfigError: The extension is unknown, the format does not support the options, or a library is missing.
    """
    if out.suffix not in FORMATS:
        raise ConfigError(f"{out.name}: name an export *.onnx, *.pt2 (torch.export) or *.xml (OpenVINO).")
    format_name = FORMATS[out.suffix]
    if format_name == "torch.export" and options.int8:
        raise ConfigError("--int8 works with .onnx and .xml; a .pt2 file is always fp32.")
    if format_name == "openvino" and options.int8 and options.include_preprocessing:
        raise ConfigError(
            "An .xml file in int8 takes images of the model's size: leave out --include-preprocessing, or write .onnx."
        )
    if format_name != "torch.export":
        missing = ENGINES[f"{format_name}-int8" if options.int8 else format_name].missing_packages
        if missing:
            raise ConfigError(f"An export to {out.suffix} needs {', '.join(missing)}: {how_to_install('export')}.")
    return format_name


def write_export(
    checkpoint: Checkpoint, out: Path, options: ExportOptions, calibration: Tensor | None = None
) -> Engine:
    """Write `out` (for .xml, the weights go to a .bin file beside it), and open it again as any program would.

    Args:
        checkpoint: The model.
        out: Its extension selects the format.
        options: Precision, preprocessing and token merging.
        calibration: Images, uint8 (N, H, W, C), that set the quantization ranges; by default, crops of photographs.
    """
    format_name = check_format(out, options)
    try:
        return build_and_write(format_name, checkpoint, out, options, calibration)
    except (PatchwordError, OSError):
        raise
    except Exception as error:  # any failure of an exporter
        raise ExportError(f"This model cannot be exported to {out.suffix}: {one_line(error, 300)}") from error


def build_and_write(
    format_name: str, checkpoint: Checkpoint, out: Path, options: ExportOptions, calibration: Tensor | None
) -> Engine:
    """Build the graph in the given format, write it and open it."""
    merge_counts, whole = options.merge_counts, options.include_preprocessing
    metadata = export_metadata(checkpoint, options)
    if format_name == "torch.export":
        return write_pt2(ExportableModel(checkpoint, merge_counts, include_preprocessing=whole), out, metadata)
    from .int8_quantization import prepare_for_int8
    from .onnx import export_onnx

    if calibration is None:
        assert checkpoint.preprocess is not None
        calibration = sample_images(checkpoint.preprocess)
    if options.int8 and format_name == "onnx":
        model = prepare_for_int8(checkpoint, calibration, merge_counts, include_preprocessing=whole)
    else:
        model = ExportableModel(checkpoint, merge_counts, include_preprocessing=whole)
    graph = export_onnx(model)
    if format_name == "onnx":
        return write_onnx(graph, out, options, metadata)
    return write_openvino(graph, out, options, calibration, metadata)


def write_onnx(graph: Any, out: Path, options: ExportOptions, metadata: str) -> Engine:
    """Write an ONNX file, quantized if the options say so."""
    import onnx

    from .int8_quantization import quantize_dynamic_int8
    from .onnx import OnnxSession

    if options.int8:
        graph = onnx.load_from_string(quantize_dynamic_int8(graph))
    graph.metadata_props.add(key="patchword", value=metadata)
    graph.producer_name, graph.producer_version, graph.doc_string = "patchword", __version__, ""
    out.write_bytes(graph.SerializeToString())
    return OnnxSession(out.read_bytes())


def write_openvino(graph: Any, out: Path, options: ExportOptions, calibration: Tensor, metadata: str) -> Engine:
    """Write an OpenVINO model, quantized if the options say so."""
    from .openvino import OpenVinoSession, import_openvino, quantize_nncf, read_onnx

    openvino = import_openvino()
    model = read_onnx(graph.SerializeToString())
    if options.int8:
        model = quantize_nncf(model, calibration)
    model.set_rt_info(metadata, ["patchword"])
    openvino.save_model(model, str(out), compress_to_fp16=False)
    return OpenVinoSession(openvino.Core().read_model(str(out)))


def write_pt2(model: ExportableModel, out: Path, metadata: str) -> Engine:
    """Write a torch.export file."""
    example, dynamic_shapes = example_inputs(model)
    with torch.no_grad():
        program = torch.export.export(model.eval(), (example,), dynamic_shapes=(dynamic_shapes,))
    torch.export.save(program, out, extra_files={"patchword.json": metadata})
    loaded = torch.export.load(out).module()

    def run(pixels: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = loaded(pixels)
            return logits

    return run


def export_metadata(checkpoint: Checkpoint, options: ExportOptions) -> str:
    """Return what a program needs to run the file, as JSON: input, output, labels, preprocessing."""
    assert checkpoint.preprocess is not None
    height, width = checkpoint.preprocess.size
    size = "of any size" if options.include_preprocessing else f"resized and cropped to {height} x {width}"
    return json.dumps({
        "patchword": __version__,
        "input": f"uint8 (batch, height, width, channels), RGB or grayscale, {size}",
        "output": "probabilities" if options.include_preprocessing else "logits",
        "labels": checkpoint.labels, "multi_label": checkpoint.multi_label, "temperature": checkpoint.temperature,
        "preprocess": checkpoint.preprocess.to_json(), "preprocess_in_graph": options.include_preprocessing,
        "normalization_in_graph": True, "temperature_in_graph": True, "int8": options.int8,
        "merge_counts": list(options.merge_counts), "model": checkpoint.config.to_json(),
    })  # fmt: skip
