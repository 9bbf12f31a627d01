"""The ONNX form of a model: made by torch, run by ONNX Runtime."""

import contextlib
import io
import logging
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import ConfigError
from .exportable import Packed, example_of

if TYPE_CHECKING:
    import onnx
    import onnxruntime

OPSET = 20
INPUT = "pixels"
MOST_BYTES = 2**31 - 2**20  # of a file in protobuf, weights included


def make_onnx(packed: Packed) -> "onnx.ModelProto":
    """The graph with its weights; any number of pictures at once, and of any size if the module takes that."""
    size = sum(t.numel() * t.element_size() for t in packed.state_dict().values())
    if size > MOST_BYTES:
        raise ConfigError(f"The model's {size / 2**30:.1f} GiB of weights do not fit into one ONNX file (2 GiB).")
    example, shapes = example_of(packed)
    with quiet():
        program = torch.onnx.export(
            packed.eval(), (example,), dynamo=True, opset_version=OPSET, dynamic_shapes=(shapes,),
            input_names=[INPUT], output_names=["probabilities" if packed.whole else "logits"], verbose=False,
        )  # fmt: skip
    assert program is not None
    model = program.model_proto
    del model.graph.value_info[:]  # torch leaves shapes from before its optimisation, at which quantisers stumble
    for node in model.graph.node:
        del node.metadata_props[:]  # where the code stood that made them: paths of this machine
    return model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Exporters tell of what they skip and of what they will change some day, and draw bars of their own."""
    names = ("torch.onnx", "onnxscript", "onnx_ir", "root", "nncf")
    levels = {name: logging.getLogger(name).level for name in names}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


class OnnxSession:
    """uint8 (B, H, W, C) to the graph's output, on as many cores as the calling thread may use.

    A session has threads of its own. Callers that each keep to one core, as those of `Classifier.stream`, share one
    that has none; a caller that may use all cores gets another.
    """

    def __init__(self, model: bytes) -> None:
        self.content, self.lock = model, threading.Lock()
        self.sessions: dict[int, onnxruntime.InferenceSession] = {}
        self.session(torch.get_num_threads())

    def __call__(self, pixels: Tensor) -> Tensor:
        session = self.session(torch.get_num_threads())
        return torch.from_numpy(session.run(None, {INPUT: pixels.numpy()})[0])

    def session(self, threads: int) -> "onnxruntime.InferenceSession":
        with self.lock:
            if threads not in self.sessions:
                self.sessions[threads] = open_session(self.content, threads)
            return self.sessions[threads]


def open_session(model: bytes, threads: int) -> "onnxruntime.InferenceSession":
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.force_spinning_stop", "1")  # after a run, cores are left to others
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
