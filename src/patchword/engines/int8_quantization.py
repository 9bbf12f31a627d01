"""int8 quantization of the matmuls with little loss of accuracy.

Weights are quantized per output channel. Activations are quantized per tensor: with the range of the current batch
(dynamic) or with one measured beforehand (static). Outliers stretch that range and cost accuracy. Two remedies:

* Outlier channels after a LayerNorm are scaled down there and up in the weights (Xiao et al., 2023, "SmoothQuant").
* Outlier rows are scaled down before the matmul and up after it, in the few layers where a measurement shows that
  rounding hurts. In ViT-Ti/16 that is one MLP in the middle, which alone costs 3 points of accuracy.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..checkpoints import Checkpoint
from ..config import ViTConfig
from ..errors import ConfigError
from ..models import ViT
from .exportable import ExportableModel
from .onnx import INPUT, suppress_output

if TYPE_CHECKING:
    import onnx

MAX_ROUNDING_ERROR = 0.05  # relative error of a layer's output above which its rows are scaled; most have 0.01 to 0.03
SMOOTHING_ALPHA = 0.5  # SmoothQuant's alpha: how much of an outlier moves into the weights
BATCH_SIZE = 16

Hook = Callable[[nn.Linear, tuple[Tensor, ...], Tensor], None]


def prepare_for_int8(
    checkpoint: Checkpoint, pixels: Tensor, merge_counts: Sequence[int] = (), *, include_preprocessing: bool = False
) -> ExportableModel:
    """Return a model that computes the same in float32, but loses less when it is quantized.

    Args:
        checkpoint: The model.
        pixels: Calibration images, uint8 (N, H, W, C).
        merge_counts: Patches to merge in each block.
        include_preprocessing: As in `ExportableModel`.
    """
    if not isinstance(checkpoint.config, ViTConfig):
        raise ConfigError("int8 needs a Vision Transformer: this model has no linear layers in transformer blocks.")
    smooth = smooth_quant(checkpoint, pixels)
    model = ExportableModel(smooth, merge_counts, include_preprocessing=include_preprocessing).eval()
    scale_outlier_rows(model.model, model.preprocess.normalize(pixels))
    return model


def smooth_quant(checkpoint: Checkpoint, pixels: Tensor) -> Checkpoint:
    """Move outlier channels from the LayerNorms into the weights that follow (SmoothQuant); outputs stay the same."""
    model = checkpoint.build_model()
    if not isinstance(model, ViT) or not model.config.pre_norm or checkpoint.preprocess is None:
        return checkpoint
    linear_after = {}
    for layer in range(model.config.depth):
        linear_after[f"blocks.{layer}.norm1"] = f"blocks.{layer}.attention.qkv"
        linear_after[f"blocks.{layer}.norm2"] = f"blocks.{layer}.mlp.fc1"
    largest = max_abs_inputs(model, list(linear_after.values()), checkpoint.preprocess.normalize(pixels))
    tensors = {name: tensor.float() for name, tensor in checkpoint.tensors.items()}
    for norm, linear in linear_after.items():
        weight = tensors[f"{linear}.weight"]
        weight_scale = weight.abs().amax(dim=0).clamp(min=1e-5) ** (1 - SMOOTHING_ALPHA)
        scale = largest[linear].clamp(min=1e-5) ** SMOOTHING_ALPHA / weight_scale
        tensors[f"{linear}.weight"] = weight * scale
        for name in (f"{norm}.weight", f"{norm}.bias"):
            if name in tensors:  # RMSNorm has no bias
                tensors[name] = tensors[name] / scale
    return dataclasses.replace(checkpoint, tensors=tensors)


class RowScaledLinear(nn.Module):
    """A linear layer that divides each input row by its largest value before the matmul and multiplies it back after.

    All rows of a matmul share one int8 range. In some middle block of most ViTs a few tokens are a hundred times larger
    than the rest; without scaling, the rest would be rounded to zero.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        largest = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-6)
        result = nn.functional.linear(x / largest, self.weight) * largest
        return result if self.bias is None else result + self.bias


def scale_outlier_rows(model: nn.Module, images: Tensor) -> list[str]:
    """Replace the linear layers that lose most by quantized inputs, in place, and return their names."""
    errors = quantization_errors(model, images)
    names = [name for name, error in errors.items() if error > MAX_ROUNDING_ERROR]
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        model.set_submodule(name, RowScaledLinear(linear))
    return names


def quantization_errors(model: nn.Module, images: Tensor) -> dict[str, float]:
    """Return, for each linear layer, the median relative error of a token's output if its input is int8."""
    errors: dict[str, list[Tensor]] = {}

    def record_error(name: str) -> Hook:
        def hook(module: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            (x,) = inputs
            if x.ndim < 3:  # one row per image: such matmuls stay in float
                return
            step = (x.amax().clamp(min=0) - x.amin().clamp(max=0)) / 255
            error = nn.functional.linear((x / step).round() * step - x, module.weight)
            relative = error.norm(dim=-1) / output.norm(dim=-1).clamp(min=1e-9)
            errors.setdefault(name, []).append(relative.flatten())

        return hook

    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    run_with_hooks(model, names, images, record_error)
    return {name: float(torch.cat(values).median()) for name, values in errors.items()}


def max_abs_inputs(model: nn.Module, names: list[str], images: Tensor) -> dict[str, Tensor]:
    """Return, for each of these layers, the largest absolute value of each input channel."""
    largest: dict[str, Tensor] = {}

    def record_maximum(name: str) -> Hook:
        def hook(module: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            values = inputs[0].flatten(0, -2).abs().amax(dim=0)
            largest[name] = torch.maximum(largest[name], values) if name in largest else values

        return hook

    run_with_hooks(model, names, images, record_maximum)
    return largest


def run_with_hooks(model: nn.Module, names: list[str], images: Tensor, make_hook: Callable[[str], Hook]) -> None:
    """Run the model over images with a forward hook on each of these layers."""
    with contextlib.ExitStack() as stack:
        for name in names:
            handle = model.get_submodule(name).register_forward_hook(make_hook(name))
            stack.callback(handle.remove)
        with torch.no_grad():  # tensors from inference mode could not be saved
            for batch in torch.split(images, BATCH_SIZE):
                model(batch)


def quantize_dynamic_int8(model: "onnx.ModelProto") -> bytes:
    """Quantize the matmuls with weights to int8; activation ranges are those of each batch.

    Weights get 7 bits (`reduce_range`): on CPUs without int8 dot products (VNNI), sums of two products overflow 16
    bits. With 8 bits ViT-Ti/16 silently loses ten points of accuracy there.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder, suppress_output():
        out = Path(folder) / "int8.onnx"
        quantize_dynamic(
            model, out, op_types_to_quantize=["MatMul"], per_channel=True, weight_type=QuantType.QInt8,
            reduce_range=True,
        )  # fmt: skip
        return out.read_bytes()


def quantize_static_int8(model: "onnx.ModelProto", pixels: Tensor) -> bytes:
    """Quantize the matmuls with weights to int8, with activation ranges measured on images."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    with tempfile.TemporaryDirectory() as folder, suppress_output():
        out = Path(folder) / "int8.onnx"
        quantize_static(
            model, out, CalibrationReader(pixels), quant_format=QuantFormat.QDQ, op_types_to_quantize=["MatMul"],
            per_channel=True, reduce_range=True, activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True, "OpTypesToExcludeOutputQuantization": ["MatMul"]},
        )  # fmt: skip
        return out.read_bytes()


class CalibrationReader:
    """The interface of ONNX Runtime's CalibrationDataReader: one batch per call, then None."""

    def __init__(self, pixels: Tensor) -> None:
        self.batches = iter(torch.split(pixels, 8))

    def get_next(self) -> dict[str, np.ndarray[Any, Any]] | None:
        """Return the inputs of the next batch."""
        batch = next(self.batches, None)
        return None if batch is None else {INPUT: batch.numpy()}
