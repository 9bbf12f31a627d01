"""A model as a file that runs without patchword: ONNX, torch.export or OpenVINO, proved before it gets its name."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..checkpoints import Checkpoint
from ..errors import ConfigError, ExportError, PatchwordError, how_to_install
from .engine import ENGINES, Engine, first_line
from .exportable import Packed, example_of
from .parity import sample_pictures

FORMATS = {".onnx": "onnx", ".pt2": "torch.export", ".xml": "openvino"}


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """What is asked of an export.

    Args:
        int8: eight bits in the large products
        whole: pictures of any size in, probabilities out
        merged: patches to merge in each block
    """

    int8: bool = False
    whole: bool = False
    merged: Sequence[int] = ()

    @property
    def exact(self) -> bool:
        """Whether nothing but rounding may differ."""
        return not self.int8 and not any(self.merged) and not self.whole


def check_format(out: Path, wanted: ExportOptions) -> str:
    """The format that the ending stands for, if it can hold what is wanted and its libraries are there."""
    if out.suffix not in FORMATS:
        raise ConfigError(f"{out.name}: an export is named *.onnx, *.pt2 (torch.export) or *.xml (OpenVINO).")
    kind = FORMATS[out.suffix]
    if kind == "torch.export" and wanted.int8:
        raise ConfigError("int8 goes with .onnx and .xml; a .pt2 is written in fp32.")
    if kind == "openvino" and wanted.int8 and wanted.whole:
        raise ConfigError("An .xml in int8 takes pictures that are resized already: leave out --whole, or write .onnx.")
    if kind != "torch.export" and (missing := ENGINES[f"{kind}-int8" if wanted.int8 else kind].missing):
        raise ConfigError(f"An export to {out.suffix} needs {', '.join(missing)}: {how_to_install('export')}.")
    return kind


def write_export(checkpoint: Checkpoint, out: Path, wanted: ExportOptions, calibration: Tensor | None = None) -> Engine:
    """Writes `out` (an .xml has its weights in a .bin beside it) and opens it again as anyone would."""
    kind = check_format(out, wanted)
    try:
        return made(kind, checkpoint, out, wanted, calibration)
    except (PatchwordError, OSError):
        raise
    except Exception as error:  # whatever an exporter stumbles on
        raise ExportError(f"This model cannot be exported to {out.suffix}: {first_line(error)}") from error


def made(kind: str, checkpoint: Checkpoint, out: Path, wanted: ExportOptions, calibration: Tensor | None) -> Engine:
    if kind == "torch.export":
        return make_pt2(Packed(checkpoint, wanted.merged, whole=wanted.whole), out, about(checkpoint, wanted))
    from .onnx import make_onnx
    from .quantize import int8_ready

    if calibration is None:
        assert checkpoint.preprocess is not None
        calibration = sample_pictures(checkpoint.preprocess)
    if wanted.int8 and kind == "onnx":
        packed = int8_ready(checkpoint, calibration, wanted.merged, whole=wanted.whole)
    else:
        packed = Packed(checkpoint, wanted.merged, whole=wanted.whole)
    graph = make_onnx(packed)
    if kind == "onnx":
        return write_onnx(graph, out, wanted, about(checkpoint, wanted))
    return write_openvino(graph, out, wanted, calibration, about(checkpoint, wanted))


def write_onnx(graph: Any, out: Path, wanted: ExportOptions, said: str) -> Engine:
    import onnx

    from .onnx import OnnxSession
    from .quantize import int8_dynamic

    if wanted.int8:
        graph = onnx.load_from_string(int8_dynamic(graph))
    graph.metadata_props.add(key="patchword", value=said)
    graph.producer_name, graph.producer_version, graph.doc_string = "patchword", __version__, ""
    out.write_bytes(graph.SerializeToString())
    return OnnxSession(out.read_bytes())


def write_openvino(graph: Any, out: Path, wanted: ExportOptions, calibration: Tensor, said: str) -> Engine:
    import openvino

    from .openvino import OpenVinoSession, int8_openvino, make_openvino

    model = make_openvino(graph.SerializeToString())
    if wanted.int8:
        model = int8_openvino(model, calibration)
    model.set_rt_info(said, ["patchword"])
    openvino.save_model(model, str(out), compress_to_fp16=False)
    return OpenVinoSession(openvino.Core().read_model(str(out)))


def make_pt2(packed: Packed, out: Path, said: str) -> Engine:
    example, shapes = example_of(packed)
    with torch.no_grad():
        program = torch.export.export(packed.eval(), (example,), dynamic_shapes=(shapes,))
    torch.export.save(program, out, extra_files={"patchword.json": said})
    loaded = torch.export.load(out).module()

    def run(pixels: Tensor) -> Tensor:
        with torch.no_grad():
            return loaded(pixels)

    return run


def about(checkpoint: Checkpoint, wanted: ExportOptions) -> str:
    """What a program that runs the file must know, as JSON."""
    assert checkpoint.preprocess is not None
    size = list(checkpoint.preprocess.size)
    takes = "uint8 (batch, height, width, channels), RGB or grey"
    takes += ", of any size" if wanted.whole else f", resized and cropped to {size[0]} x {size[1]}"
    return json.dumps({
        "patchword": __version__, "input": takes, "output": "probabilities" if wanted.whole else "logits",
        "labels": checkpoint.labels, "multi_label": checkpoint.multi_label, "temperature": checkpoint.temperature,
        "preprocess": checkpoint.preprocess.to_json(), "preprocess_in_graph": wanted.whole,
        "normalisation_in_graph": True, "temperature_in_graph": True, "int8": wanted.int8,
        "merged": list(wanted.merged), "model": checkpoint.config.to_json(),
    })  # fmt: skip
