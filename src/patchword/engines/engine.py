"""Where a model runs: each engine turns uint8 pictures, as the model sees them, into logits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch
from torch import Tensor

from ..checkpoints import Checkpoint
from ..errors import ConfigError, how_to_install
from ..models import Model, optimize_for_cpu
from ..models.token_merging import merge_schedule, reduce_tokens
from .engine_cache import digest, keep_file, read_file
from .exportable import Packed

Engine = Callable[[Tensor], Tensor]  # uint8 (B, H, W, C) to float32 (B, K), divided by the temperature
Merged = Sequence[int]
CALIBRATION = 48  # pictures, where none are given
MERGED = 0.1  # of the patches in each block behind the first quarter, by the engine that merges


@dataclass(frozen=True)
class Kind:
    """A way to run a model: opened from the model itself, or started from a file that is made of it once."""

    name: str
    means: str
    open: Callable[[Checkpoint, Merged], Engine] | None = None  # patches to merge in each block
    make: Callable[[Checkpoint, Tensor, Merged], bytes] | None = None  # pictures to calibrate with
    start: Callable[[bytes], Engine] | None = None  # from what was made
    needs: tuple[str, ...] = ()  # packages, all of them in the extra "export"
    exact: bool = True  # in fp32: answers differ from torch's by rounding only

    @property
    def missing(self) -> list[str]:
        return [name for name in self.needs if find_spec(name) is None]


@dataclass(frozen=True)
class PreparedEngine:
    """An engine that can be opened fast, here or in another process."""

    name: str
    file: bytes = field(default=b"", repr=False)  # what it is started from; empty: the model itself

    def opened(self, checkpoint: Checkpoint, merged: Merged = ()) -> Engine:
        kind = ENGINES[self.name]
        if kind.start is not None:
            return kind.start(self.file)
        assert kind.open is not None
        return kind.open(checkpoint, merged)


def open_engine(name: str, checkpoint: Checkpoint, calibration: Tensor | None = None, merged: Merged = ()) -> Engine:
    """The engine of that name for a model.

    Args:
        calibration: pictures uint8 (N, H, W, C) for engines that measure ranges; some photographs by default
        merged: patches to merge in each block
    """
    return prepare(name, checkpoint, calibration, merged).opened(checkpoint, merged)


def prepare(
    name: str, checkpoint: Checkpoint, calibration: Tensor | None = None, merged: Merged = ()
) -> PreparedEngine:
    """The same, not opened yet. Its file is made once for each model, and kept in the user's cache."""
    if name not in ENGINES:
        raise ConfigError(f"There is no engine {name!r}; there are {', '.join(ENGINES)}, and auto.")
    kind = ENGINES[name]
    if kind.missing:
        raise ConfigError(f"The engine {name} needs {', '.join(kind.missing)}: {how_to_install('export')}.")
    if kind.make is None:
        return PreparedEngine(name)
    if kind.exact:  # nothing is measured: the file is the same for all pictures
        calibration = torch.zeros(0, dtype=torch.uint8)
    elif calibration is None:
        from .parity import sample_pictures

        assert checkpoint.preprocess is not None
        calibration = sample_pictures(checkpoint.preprocess)
    place = digest(kind.make.__name__, checkpoint, calibration, merged)  # engines may share a file
    file = read_file(place)
    if file is None:
        file = kind.make(checkpoint, calibration, merged)
        keep_file(place, file)
    return PreparedEngine(name, file)


def first_line(error: Exception) -> str:
    """What a library said, short enough for a message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def open_torch(checkpoint: Checkpoint, merged: Merged) -> Engine:
    return torch_engine(checkpoint, checkpoint.model(), merged)


def torch_engine(checkpoint: Checkpoint, whole: Model, merged: Merged = ()) -> Engine:
    """PyTorch, for a model that was built already."""
    preprocess, temperature = checkpoint.preprocess, checkpoint.temperature
    model = reduce_tokens(optimize_for_cpu(whole), merged)
    assert preprocess is not None

    def run(pixels: Tensor) -> Tensor:
        with torch.inference_mode():
            return model(preprocess.normalise(pixels)) / temperature

    return run


def open_compiled(checkpoint: Checkpoint, merged: Merged) -> Engine:
    compiled = torch.compile(Packed(checkpoint, merged).eval(), dynamic=True)

    def run(pixels: Tensor) -> Tensor:
        with torch.no_grad():
            return compiled(pixels)

    return run


def open_torch_int8(checkpoint: Checkpoint, merged: Merged) -> Engine:
    from .torch_int8 import in_int8

    packed = in_int8(Packed(checkpoint, merged).eval())

    def run(pixels: Tensor) -> Tensor:
        with torch.inference_mode():
            return packed(pixels)

    return run


def make_fp32(checkpoint: Checkpoint, calibration: Tensor, merged: Merged) -> bytes:
    from .onnx import make_onnx

    return make_onnx(Packed(checkpoint, merged)).SerializeToString()


def make_int8(checkpoint: Checkpoint, calibration: Tensor, merged: Merged) -> bytes:
    from .onnx import make_onnx
    from .quantize import int8_dynamic, int8_ready

    return int8_dynamic(make_onnx(int8_ready(checkpoint, calibration, merged)))


def make_merged(checkpoint: Checkpoint, calibration: Tensor, merged: Merged) -> bytes:
    return make_int8(checkpoint, calibration, merged or merge_schedule(checkpoint.config, MERGED))


def make_static(checkpoint: Checkpoint, calibration: Tensor, merged: Merged) -> bytes:
    from .onnx import make_onnx
    from .quantize import int8_ready, int8_static

    return int8_static(make_onnx(int8_ready(checkpoint, calibration, merged)), calibration)


def make_nncf(checkpoint: Checkpoint, calibration: Tensor, merged: Merged) -> bytes:
    from .onnx import make_onnx
    from .openvino import as_bytes, int8_openvino, make_openvino

    graph = make_onnx(Packed(checkpoint, merged)).SerializeToString()
    return as_bytes(int8_openvino(make_openvino(graph), calibration))


def start_onnx(file: bytes) -> Engine:
    from .onnx import OnnxSession

    return OnnxSession(file)


def start_openvino(file: bytes) -> Engine:
    from .openvino import OpenVinoSession, make_openvino

    return OpenVinoSession(make_openvino(file))


def start_nncf(file: bytes) -> Engine:
    from .openvino import OpenVinoSession, from_bytes

    return OpenVinoSession(from_bytes(file))


_ONNX = ("onnx", "onnxscript", "onnxruntime")
_VINO = ("onnx", "onnxscript", "openvino")
ENGINES = {
    kind.name: kind
    for kind in (
        Kind("torch", "PyTorch, fp32", open_torch),
        Kind("torch-compiled", "torch.compile, fp32", open_compiled),
        Kind("torch-int8", "PyTorch, int8 by token", open_torch_int8, exact=False),
        Kind("onnx", "ONNX Runtime, fp32", None, make_fp32, start_onnx, _ONNX),
        Kind("onnx-int8", "ONNX Runtime, int8, ranges of each batch", None, make_int8, start_onnx, _ONNX, False),
        Kind("onnx-merged", "ONNX Runtime, int8, patches merged", None, make_merged, start_onnx, _ONNX, False),
        Kind("onnx-static", "ONNX Runtime, int8, ranges measured before", None, make_static, start_onnx, _ONNX, False),
        Kind("openvino", "OpenVINO, fp32", None, make_fp32, start_openvino, _VINO),
        Kind("openvino-int8", "OpenVINO, int8 by NNCF", None, make_nncf, start_nncf, (*_VINO, "nncf"), False),
    )
}
