"""Inference engines: each maps uint8 images, resized and cropped for the model, to logits."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch
from torch import Tensor

from ..checkpoints import Checkpoint
from ..errors import ConfigError, how_to_install
from ..models import Model, optimize_for_cpu
from ..models.token_merging import merge_schedule, reduce_tokens
from .engine_cache import cache_key, load_file, store_file
from .exportable import ExportableModel

Engine = Callable[[Tensor], Tensor]
"""A function from pixels, uint8 (B, H, W, C), to logits, float32 (B, K), divided by the temperature."""
MergeCounts = Sequence[int]  # patches to merge in each block (ToMe)
NUM_CALIBRATION_IMAGES = 48  # used where the caller gives none
DEFAULT_TOME_RATIO = 0.1  # fraction of the patches that onnx-int8-tome merges per block


@dataclass(frozen=True)
class EngineSpec:
    """How to run a model: either `open` the checkpoint directly, or `build` a file once and `load` it.

    Attributes:
        name: As in `--engine NAME`.
        description: Runtime and precision, for users.
        open: Opens a checkpoint directly.
        build: Builds the file from checkpoint, calibration images and merge counts.
        load: Opens what `build` returned.
        requires: Packages, all of them in the extra "export".
        exact: Runs in fp32: logits differ from PyTorch's by rounding only.
    """

    name: str
    description: str
    open: Callable[[Checkpoint, MergeCounts], Engine] | None = None
    build: Callable[[Checkpoint, Tensor, MergeCounts], bytes] | None = None
    load: Callable[[bytes], Engine] | None = None
    requires: tuple[str, ...] = ()
    exact: bool = True

    @property
    def missing_packages(self) -> list[str]:
        return [name for name in self.requires if find_spec(name) is None]


@dataclass(frozen=True)
class PreparedEngine:
    """An engine that opens fast, in this process or another.

    Attributes:
        name: Key in `ENGINES`.
        file: What the engine loads; empty if it opens the checkpoint itself.
    """

    name: str
    file: bytes = field(default=b"", repr=False)

    def open(self, checkpoint: Checkpoint, merge_counts: MergeCounts = ()) -> Engine:
        """Open the engine; `merge_counts` must be those it was prepared with."""
        spec = ENGINES[self.name]
        if spec.load is not None:
            return spec.load(self.file)
        assert spec.open is not None
        return spec.open(checkpoint, merge_counts)


def open_engine(
    name: str, checkpoint: Checkpoint, calibration: Tensor | None = None, merge_counts: MergeCounts = ()
) -> Engine:
    """Open the engine `name` for a model.

    Args:
        name: Key in `ENGINES`.
        checkpoint: The model.
        calibration: Images, uint8 (N, H, W, C), for engines that measure quantization ranges; by default, crops of
            photographs.
        merge_counts: Patches to merge in each block.
    """
    return prepare_engine(name, checkpoint, calibration, merge_counts).open(checkpoint, merge_counts)


def prepare_engine(
    name: str, checkpoint: Checkpoint, calibration: Tensor | None = None, merge_counts: MergeCounts = ()
) -> PreparedEngine:
    """Do the slow part of `open_engine`. The file is built once per model and cached."""
    if name not in ENGINES:
        near = RENAMED_ENGINES.get(name) or next(iter(difflib.get_close_matches(name, ENGINES, n=1)), None)
        hint = f" Did you mean {near}?" if near else ""
        raise ConfigError(f"There is no engine {name!r}.{hint} Choose one of {', '.join(ENGINES)}, or auto.")
    spec = ENGINES[name]
    if spec.missing_packages:
        raise ConfigError(f"The engine {name} needs {', '.join(spec.missing_packages)}: {how_to_install('export')}.")
    if spec.build is None:
        return PreparedEngine(name)
    if spec.exact:  # nothing to calibrate: the file does not depend on images
        calibration = torch.zeros(0, dtype=torch.uint8)
    elif calibration is None:
        from .parity import sample_images

        assert checkpoint.preprocess is not None
        calibration = sample_images(checkpoint.preprocess)
    key = cache_key(spec.build.__name__, checkpoint, calibration, merge_counts)  # engines may share a file
    file = load_file(key)
    if file is None:
        file = spec.build(checkpoint, calibration, merge_counts)
        store_file(key, file)
    return PreparedEngine(name, file)


def open_torch(checkpoint: Checkpoint, merge_counts: MergeCounts) -> Engine:
    """Open the engine `torch`."""
    return torch_engine(checkpoint, checkpoint.build_model(), merge_counts)


def torch_engine(checkpoint: Checkpoint, model: Model, merge_counts: MergeCounts = ()) -> Engine:
    """Wrap a model that was built already as an engine."""
    preprocess, temperature = checkpoint.preprocess, checkpoint.temperature
    fast_model = reduce_tokens(optimize_for_cpu(model), merge_counts)
    assert preprocess is not None

    def run(pixels: Tensor) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = fast_model(preprocess.normalize(pixels)) / temperature
            return logits

    return run


def open_torch_compiled(checkpoint: Checkpoint, merge_counts: MergeCounts) -> Engine:
    """Open the engine `torch-compiled`."""
    compiled = torch.compile(ExportableModel(checkpoint, merge_counts).eval(), dynamic=True)

    def run(pixels: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = compiled(pixels)
            return logits

    return run


def open_torch_int8(checkpoint: Checkpoint, merge_counts: MergeCounts) -> Engine:
    """Open the engine `torch-int8`."""
    from .int8_linear import quantize_linear_layers

    model = quantize_linear_layers(ExportableModel(checkpoint, merge_counts).eval())

    def run(pixels: Tensor) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = model(pixels)
            return logits

    return run


def build_onnx(checkpoint: Checkpoint, calibration: Tensor, merge_counts: MergeCounts) -> bytes:
    """Build an ONNX file in fp32."""
    from .onnx import export_onnx

    content: bytes = export_onnx(ExportableModel(checkpoint, merge_counts)).SerializeToString()
    return content


def build_onnx_int8(checkpoint: Checkpoint, calibration: Tensor, merge_counts: MergeCounts) -> bytes:
    """Build an ONNX file with dynamic int8 quantization."""
    from .int8_quantization import prepare_for_int8, quantize_dynamic_int8
    from .onnx import export_onnx

    return quantize_dynamic_int8(export_onnx(prepare_for_int8(checkpoint, calibration, merge_counts)))


def build_onnx_int8_tome(checkpoint: Checkpoint, calibration: Tensor, merge_counts: MergeCounts) -> bytes:
    """Build an ONNX file with dynamic int8 quantization and token merging (Bolya et al., 2023, "ToMe")."""
    merge_counts = merge_counts or merge_schedule(checkpoint.config, DEFAULT_TOME_RATIO)
    return build_onnx_int8(checkpoint, calibration, merge_counts)


def build_onnx_int8_static(checkpoint: Checkpoint, calibration: Tensor, merge_counts: MergeCounts) -> bytes:
    """Build an ONNX file with static int8 quantization."""
    from .int8_quantization import prepare_for_int8, quantize_static_int8
    from .onnx import export_onnx

    return quantize_static_int8(export_onnx(prepare_for_int8(checkpoint, calibration, merge_counts)), calibration)


def build_openvino_int8(checkpoint: Checkpoint, calibration: Tensor, merge_counts: MergeCounts) -> bytes:
    """Build an OpenVINO model that NNCF quantized to int8."""
    from .openvino import quantize_nncf, read_onnx, to_bytes

    return to_bytes(quantize_nncf(read_onnx(build_onnx(checkpoint, calibration, merge_counts)), calibration))


def load_onnx(file: bytes) -> Engine:
    """Open an ONNX file in ONNX Runtime."""
    from .onnx import OnnxSession

    return OnnxSession(file)


def load_openvino_from_onnx(file: bytes) -> Engine:
    """Open an ONNX file in OpenVINO."""
    from .openvino import OpenVinoSession, read_onnx

    return OpenVinoSession(read_onnx(file))


def load_openvino(file: bytes) -> Engine:
    """Open what `to_bytes` of openvino.py made."""
    from .openvino import OpenVinoSession, from_bytes

    return OpenVinoSession(from_bytes(file))


_ONNX = ("onnx", "onnxscript", "onnxruntime")
_OPENVINO = ("onnx", "onnxscript", "openvino")
_SPECS = (
    EngineSpec("torch", "PyTorch, fp32", open_torch),
    EngineSpec("torch-compiled", "torch.compile, fp32", open_torch_compiled),
    EngineSpec("torch-int8", "PyTorch, int8, quantized per token", open_torch_int8, exact=False),
    EngineSpec("onnx", "ONNX Runtime, fp32", None, build_onnx, load_onnx, _ONNX),
    EngineSpec("onnx-int8", "ONNX Runtime, dynamic int8", None, build_onnx_int8, load_onnx, _ONNX, False),
    EngineSpec(
        "onnx-int8-tome", "ONNX Runtime, dynamic int8, token merging", None, build_onnx_int8_tome, load_onnx, _ONNX,
        False,
    ),
    EngineSpec("onnx-int8-static", "ONNX Runtime, static int8", None, build_onnx_int8_static, load_onnx, _ONNX, False),
    EngineSpec("openvino", "OpenVINO, fp32", None, build_onnx, load_openvino_from_onnx, _OPENVINO),
    EngineSpec(
        "openvino-int8", "OpenVINO, static int8 by NNCF", None, build_openvino_int8, load_openvino,
        (*_OPENVINO, "nncf"), False,
    ),
)  # fmt: skip
ENGINES = {spec.name: spec for spec in _SPECS}
RENAMED_ENGINES = {"onnx-merged": "onnx-int8-tome", "onnx-static": "onnx-int8-static"}
