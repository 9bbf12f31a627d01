"""Where a model runs: each engine turns uint8 pictures, as the model sees them, into logits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from ..checkpoints import Checkpoint
from ..errors import ConfigError
from ..models import Model
from ..models.lean import lean
from .packed import Packed

Engine = Callable[[Tensor], Tensor]  # uint8 (B, H, W, C) to float32 (B, K), divided by the temperature
Merged = Sequence[int]
CALIBRATION = 48  # pictures, where none are given


@dataclass(frozen=True)
class Kind:
    """A way to run a model."""

    name: str
    means: str
    open: Callable[[Checkpoint, Tensor, Merged], Engine]  # pictures to calibrate with; patches to merge in each block
    needs: tuple[str, ...] = ()  # packages, all of them in patchword[export]
    exact: bool = True  # in fp32: answers differ from torch's by rounding only

    @property
    def missing(self) -> list[str]:
        return [name for name in self.needs if find_spec(name) is None]


def open_engine(name: str, checkpoint: Checkpoint, calibration: Tensor | None = None, merged: Merged = ()) -> Engine:
    """The engine of that name for a model.

    Args:
        calibration: pictures uint8 (N, H, W, C) for engines that measure ranges; some photographs by default
        merged: patches to merge in each block
    """
    if name not in ENGINES:
        raise ConfigError(f"There is no engine {name!r}; there are {', '.join(ENGINES)}, and auto.")
    kind = ENGINES[name]
    if kind.missing:
        raise ConfigError(f"The engine {name} needs {', '.join(kind.missing)}: pip install 'patchword[export]'.")
    if calibration is None:
        from .agreement import sample_pictures

        assert checkpoint.preprocess is not None
        calibration = sample_pictures(checkpoint.preprocess, 0 if kind.exact else CALIBRATION)
    return kind.open(checkpoint, calibration, merged)


def first_line(error: Exception) -> str:
    """What a library said, short enough for a message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def open_torch(checkpoint: Checkpoint, calibration: Tensor, merged: Merged) -> Engine:
    return torch_engine(checkpoint, checkpoint.model(), merged)


def torch_engine(checkpoint: Checkpoint, whole: Model, merged: Merged = ()) -> Engine:
    """PyTorch, for a model that was built already."""
    preprocess, temperature, model = checkpoint.preprocess, checkpoint.temperature, lean(whole, merged)
    assert preprocess is not None

    def run(pixels: Tensor) -> Tensor:
        with torch.inference_mode():
            return model(preprocess.normalise(pixels)) / temperature

    return run


def open_compiled(checkpoint: Checkpoint, calibration: Tensor, merged: Merged) -> Engine:
    compiled = torch.compile(Packed(checkpoint, merged).eval(), dynamic=True)

    def run(pixels: Tensor) -> Tensor:
        with torch.no_grad():
            return compiled(pixels)

    return run


def open_torch_int8(checkpoint: Checkpoint, calibration: Tensor, merged: Merged) -> Engine:
    from .int8 import in_int8

    packed = in_int8(Packed(checkpoint, merged).eval())

    def run(pixels: Tensor) -> Tensor:
        with torch.inference_mode():
            return packed(pixels)

    return run


def open_onnx(checkpoint: Checkpoint, calibration: Tensor, merged: Merged) -> Engine:
    from .onnx import OnnxSession, make_onnx

    return OnnxSession(make_onnx(Packed(checkpoint, merged)).SerializeToString())


def open_onnx_int8(checkpoint: Checkpoint, calibration: Tensor, merged: Merged) -> Engine:
    from .onnx import OnnxSession, make_onnx
    from .quantise import int8_dynamic, int8_ready

    return OnnxSession(int8_dynamic(make_onnx(int8_ready(checkpoint, calibration, merged))))


def open_onnx_static(checkpoint: Checkpoint, calibration: Tensor, merged: Merged) -> Engine:
    from .onnx import OnnxSession, make_onnx
    from .quantise import int8_ready, int8_static

    return OnnxSession(int8_static(make_onnx(int8_ready(checkpoint, calibration, merged)), calibration))


def open_openvino(checkpoint: Checkpoint, calibration: Tensor, merged: Merged) -> Engine:
    from .onnx import make_onnx
    from .openvino import OpenVinoSession, make_openvino

    return OpenVinoSession(make_openvino(make_onnx(Packed(checkpoint, merged))))


def open_openvino_int8(checkpoint: Checkpoint, calibration: Tensor, merged: Merged) -> Engine:
    from .onnx import make_onnx
    from .openvino import OpenVinoSession, int8_openvino, make_openvino

    return OpenVinoSession(int8_openvino(make_openvino(make_onnx(Packed(checkpoint, merged))), calibration))


_ONNX = ("onnx", "onnxscript", "onnxruntime")
_VINO = ("onnx", "onnxscript", "openvino")
ENGINES = {
    kind.name: kind
    for kind in (
        Kind("torch", "PyTorch, fp32", open_torch),
        Kind("torch-compiled", "torch.compile, fp32", open_compiled),
        Kind("torch-int8", "PyTorch, int8 by token", open_torch_int8, exact=False),
        Kind("onnx", "ONNX Runtime, fp32", open_onnx, _ONNX),
        Kind("onnx-int8", "ONNX Runtime, int8, ranges of each batch", open_onnx_int8, _ONNX, exact=False),
        Kind("onnx-static", "ONNX Runtime, int8, ranges measured before", open_onnx_static, _ONNX, exact=False),
        Kind("openvino", "OpenVINO, fp32", open_openvino, _VINO),
        Kind("openvino-int8", "OpenVINO, int8 by NNCF", open_openvino_int8, (*_VINO, "nncf"), exact=False),
    )
}
