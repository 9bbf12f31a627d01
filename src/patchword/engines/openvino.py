"""OpenVINO: a model compiled for this machine's processor, in fp32 or, by NNCF, in int8."""

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .onnx import INPUT, quiet

if TYPE_CHECKING:
    import onnx


def make_openvino(model: "onnx.ModelProto") -> Any:
    import io

    import openvino

    return openvino.convert_model(io.BytesIO(model.SerializeToString()))


def int8_openvino(model: Any, pixels: Tensor) -> Any:
    """Quantised with ranges measured on pictures."""
    import nncf

    with quiet():
        batches = nncf.Dataset([{INPUT: batch.numpy()} for batch in pixels.split(1)])
        size = len(pixels)
        return nncf.quantize(model, batches, model_type=nncf.ModelType.TRANSFORMER, subset_size=size)


class OpenVinoSession:
    """uint8 (B, H, W, C) to the graph's output, on as many cores as the calling thread may use."""

    def __init__(self, model: Any) -> None:
        self.model, self.lock, self.own = model, threading.Lock(), threading.local()
        self.compiled: dict[int, Any] = {}
        self.request(torch.get_num_threads())

    def __call__(self, pixels: Tensor) -> Tensor:
        result = self.request(torch.get_num_threads()).infer({0: pixels.numpy()}, share_inputs=True)
        return torch.from_numpy(result[0].copy())

    def request(self, threads: int) -> Any:
        """Requests hold their tensors, so each thread has its own."""
        with self.lock:
            if threads not in self.compiled:
                self.compiled[threads] = compile_for(self.model, threads)
        requests = self.own.__dict__.setdefault("requests", {})
        if threads not in requests:
            requests[threads] = self.compiled[threads].create_infer_request()
        return requests[threads]


def compile_for(model: Any, threads: int) -> Any:
    import openvino

    # fp32 is asked for: the default takes bf16 where the processor announces it, and may die of it.
    settings = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    return openvino.Core().compile_model(model, "CPU", settings)
