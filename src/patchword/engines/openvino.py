"""OpenVINO: a model compiled for this machine's processor, in fp32 or, by NNCF, in int8."""

import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.runtime import cores
from .onnx import INPUT, quiet


def make_openvino(model: bytes) -> Any:
    """From an ONNX file."""
    import openvino

    # Not openvino.convert_model, which tells its makers of every call.
    return openvino.Core().read_model(model)


def as_bytes(model: Any) -> bytes:
    """OpenVINO's two files in one: the length of the first, the first, the second."""
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        openvino.save_model(model, f"{folder}/model.xml", compress_to_fp16=False)
        graph, weights = (Path(f"{folder}/model{ending}").read_bytes() for ending in (".xml", ".bin"))
    return len(graph).to_bytes(8, "big") + graph + weights


def from_bytes(file: bytes) -> Any:
    import openvino

    end = 8 + int.from_bytes(file[:8], "big")
    return openvino.Core().read_model(file[8:end], file[end:])


def int8_openvino(model: Any, pixels: Tensor) -> Any:
    """Quantised with ranges measured on pictures."""
    os.environ.setdefault("NNCF_CI", "1")  # else it tells its makers of every call
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

    # Requests of one stream wait for each other, so callers that each keep to one core need as many streams.
    streams = cores() if threads == 1 else 1
    settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads * streams, "NUM_STREAMS": streams}
    settings["INFERENCE_PRECISION_HINT"] = "f32"  # the default is bf16 where it is announced, and may die of it
    return openvino.Core().compile_model(model, "CPU", settings)
