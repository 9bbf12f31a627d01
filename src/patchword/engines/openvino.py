"""OpenVINO: models compiled for this CPU, in fp32 or quantized to int8 by NNCF."""

import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.runtime import available_cores
from .onnx import INPUT, suppress_output


def import_openvino() -> Any:
    """Import OpenVINO without its telemetry, which would contact an analytics server at the import."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # its import fails, which is handled
    import openvino

    return openvino


def read_onnx(model: bytes) -> Any:
    """Read an ONNX file as an OpenVINO model."""
    return import_openvino().Core().read_model(model)


def to_bytes(model: Any) -> bytes:
    """Serialize a model: the length of the .xml file in 8 bytes, the .xml file, the .bin file."""
    with tempfile.TemporaryDirectory() as folder:
        import_openvino().save_model(model, f"{folder}/model.xml", compress_to_fp16=False)
        graph, weights = (Path(f"{folder}/model{suffix}").read_bytes() for suffix in (".xml", ".bin"))
    return len(graph).to_bytes(8, "big") + graph + weights


def from_bytes(content: bytes) -> Any:
    """Read what `to_bytes` returned."""
    end = 8 + int.from_bytes(content[:8], "big")
    return import_openvino().Core().read_model(content[8:end], content[end:])


def quantize_nncf(model: Any, pixels: Tensor) -> Any:
    """Quantize to int8, with activation ranges measured on images."""
    os.environ.setdefault("NNCF_CI", "1")  # turns its telemetry off
    import_openvino()
    import nncf

    dataset = nncf.Dataset([{INPUT: batch.numpy()} for batch in torch.split(pixels, 1)])
    after_pooling = nncf.IgnoredScope(names=matmuls_after_pooling(model))
    with suppress_output():
        return nncf.quantize(
            model, dataset, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(pixels), ignored_scope=after_pooling
        )


def matmuls_after_pooling(model: Any) -> list[str]:
    """Return the names of the matmuls with one row per image, such as the head: they stay in float.

    NNCF's range of an activation is the mean over images of their largest values. Those of a single row differ so much
    between images that clipping changes predictions, whereas the time of such a matmul does not matter.
    """
    matmuls = (op for op in model.get_ops() if op.get_type_name() == "MatMul")
    shapes = {op.get_friendly_name(): op.input_value(0).get_partial_shape() for op in matmuls}
    return [name for name, shape in shapes.items() if len(shape) == 2 or shape[-2] == 1]


class OpenVinoSession:
    """Runs a model on uint8 (B, H, W, C), with as many threads as torch uses in the calling thread."""

    def __init__(self, model: Any) -> None:
        self.model, self.lock, self.thread_local = model, threading.Lock(), threading.local()
        self.compiled: dict[int, Any] = {}
        self.get_request(torch.get_num_threads())

    def __call__(self, pixels: Tensor) -> Tensor:
        result = self.get_request(torch.get_num_threads()).infer({0: pixels.numpy()}, share_inputs=True)
        return torch.from_numpy(result[0].copy())

    def get_request(self, num_threads: int) -> Any:
        """Return this thread's inference request: a request owns its tensors, so threads cannot share one."""
        with self.lock:
            if num_threads not in self.compiled:
                self.compiled[num_threads] = compile_model(self.model, num_threads)
        requests = self.thread_local.__dict__.setdefault("requests", {})
        if num_threads not in requests:
            requests[num_threads] = self.compiled[num_threads].create_infer_request()
        return requests[num_threads]


def compile_model(model: Any, num_threads: int) -> Any:
    """Compile a model for callers that use `num_threads` each."""
    # Requests of one stream wait for each other, so single-threaded callers need one stream per core.
    num_streams = available_cores() if num_threads == 1 else 1
    settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": num_threads * num_streams, "NUM_STREAMS": num_streams}
    settings["INFERENCE_PRECISION_HINT"] = "f32"  # the default is bf16 on CPUs that advertise it, and some then crash
    return import_openvino().Core().compile_model(model, "CPU", settings)
