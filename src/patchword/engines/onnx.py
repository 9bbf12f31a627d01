"""ONNX: exported by torch, run by ONNX Runtime."""

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
from .exportable import ExportableModel, example_inputs

if TYPE_CHECKING:
    import onnx
    import onnxruntime

OPSET = 20
INPUT = "pixels"
MAX_ONNX_BYTES = 2**31 - 2**20  # limit of a protobuf file, weights included
NOISY_LOGGERS = ("torch.onnx", "onnxscript", "onnx_ir", "root", "nncf")


def export_onnx(model: ExportableModel) -> "onnx.ModelProto":
    """Export the graph with its weights. The batch size is dynamic, and so is the image size if it is resized."""
    size = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    if size > MAX_ONNX_BYTES:
        raise ConfigError(f"The weights ({size / 2**30:.1f} GiB) exceed the size limit of an ONNX file (2 GiB).")
    example, dynamic_shapes = example_inputs(model)
    output = "probabilities" if model.include_preprocessing else "logits"
    with suppress_output():
        program = torch.onnx.export(
            model.eval(), (example,), dynamo=True, opset_version=OPSET, dynamic_shapes=(dynamic_shapes,),
            input_names=[INPUT], output_names=[output], verbose=False,
        )  # fmt: skip
    assert program is not None
    proto = program.model_proto
    del proto.graph.value_info[:]  # shapes from before torch's optimization, which confuse quantizers
    for node in proto.graph.node:
        del node.metadata_props[:]  # stack traces, with paths of this machine
    return proto


@contextlib.contextmanager
def suppress_output() -> Iterator[None]:
    """Silence the warnings, log messages and progress bars of exporters."""
    levels = {name: logging.getLogger(name).level for name in NOISY_LOGGERS}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for name in NOISY_LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


class OnnxSession:
    """Runs an ONNX file on uint8 (B, H, W, C), with as many threads as torch uses in the calling thread.

    A session of ONNX Runtime has its own threads. Callers limited to one thread, such as those of `Classifier.stream`,
    share a session without any; a caller that may use all cores gets another.
    """

    def __init__(self, model: bytes) -> None:
        self.content, self.lock = model, threading.Lock()
        self.sessions: dict[int, onnxruntime.InferenceSession] = {}
        self.get_session(torch.get_num_threads())

    def __call__(self, pixels: Tensor) -> Tensor:
        session = self.get_session(torch.get_num_threads())
        return torch.from_numpy(session.run(None, {INPUT: pixels.numpy()})[0])

    def get_session(self, num_threads: int) -> "onnxruntime.InferenceSession":
        """Return the session for a number of threads, opened once."""
        with self.lock:
            if num_threads not in self.sessions:
                self.sessions[num_threads] = open_session(self.content, num_threads)
            return self.sessions[num_threads]


def open_session(model: bytes, num_threads: int) -> "onnxruntime.InferenceSession":
    """Open an ONNX file on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = num_threads, 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.force_spinning_stop", "1")  # idle threads must not busy-wait
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
