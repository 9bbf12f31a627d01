"""Eight bits for weights and activations of the large matrix products, at as little loss as can be had.

Weights are rounded for each output channel. Activations are rounded for each product: by the range that the batch at
hand has (dynamic), or by one measured beforehand (static). What loses accuracy is a range that outliers stretch, so:

* channels that stick out behind a norm are scaled down there and up in the weights (Xiao et al., 2023, "SmoothQuant");
* rows that stick out are scaled down before the product and up behind it, in the few layers where a trial on pictures
  shows that rounding hurts. In ViT-Ti/16 that is one MLP in the middle, which alone costs 3 points of accuracy.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..checkpoints import Checkpoint
from ..config import ViTConfig
from ..errors import ConfigError
from ..models import ViT
from .exportable import Packed
from .onnx import INPUT, quiet

if TYPE_CHECKING:
    import onnx

ROUNDING = 0.05  # relative error of a result above which a layer's rows are scaled: most have 0.01 to 0.03
STRENGTH = 0.5  # how much of an outlier's size goes into the weights: SmoothQuant's alpha


def int8_ready(checkpoint: Checkpoint, pixels: Tensor, merged: Sequence[int] = (), *, whole: bool = False) -> Packed:
    """The model, the same in float32, so that rounding does little harm.

    Args:
        pixels: uint8 (N, H, W, C), pictures that show what is large
    """
    if not isinstance(checkpoint.config, ViTConfig):
        raise ConfigError("The model has no large matrix products, which is what int8 is for here.")
    packed = Packed(smoothed(checkpoint, pixels), merged, whole=whole).eval()
    scale_rows(packed.model, packed.preprocess.normalise(pixels))
    return packed


def smoothed(checkpoint: Checkpoint, pixels: Tensor) -> Checkpoint:
    """The same function with outliers of normed activations divided out of norms and multiplied into weights."""
    model = checkpoint.model()
    if not isinstance(model, ViT) or model.config.post_norm or checkpoint.preprocess is None:
        return checkpoint
    pairs = {}
    for number in range(model.config.depth):
        pairs[f"blocks.{number}.norm1"] = f"blocks.{number}.attention.qkv"
        pairs[f"blocks.{number}.norm2"] = f"blocks.{number}.mlp.fc1"
    largest = largest_inputs(model, list(pairs.values()), checkpoint.preprocess.normalise(pixels))
    tensors = {name: tensor.float() for name, tensor in checkpoint.tensors.items()}
    for norm, linear in pairs.items():
        weight = tensors[f"{linear}.weight"]
        scale = largest[linear].clamp(min=1e-5) ** STRENGTH / weight.abs().amax(dim=0).clamp(min=1e-5) ** (1 - STRENGTH)
        tensors[f"{linear}.weight"] = weight * scale
        tensors[f"{norm}.weight"] = tensors[f"{norm}.weight"] / scale
        tensors[f"{norm}.bias"] = tensors[f"{norm}.bias"] / scale
    return dataclasses.replace(checkpoint, tensors=tensors)


class RowScaled(nn.Module):
    """A linear layer whose input rows are divided by their largest value before the product, and its result multiplied.

    All rows of a product share one range of eight bits. Where a few tokens are a hundred times as large as the rest,
    as in some middle block of most ViTs, the rest would all be rounded to nothing.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        largest = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-6)
        result = nn.functional.linear(x / largest, self.weight) * largest
        return result if self.bias is None else result + self.bias


def scale_rows(model: nn.Module, images: Tensor) -> list[str]:
    """Replaces the linear layers that rounding their input would hurt, in place; their names."""
    errors = rounding_errors(model, images)
    chosen = [name for name, error in errors.items() if error > ROUNDING]
    for name in chosen:
        model.set_submodule(name, RowScaled(model.get_submodule(name)))  # type: ignore[arg-type]
    return chosen


def rounding_errors(model: nn.Module, images: Tensor) -> dict[str, float]:
    """For each linear layer, how far a token's result is off if its input is rounded to 8 bits of the input's range."""
    found: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            (x,) = inputs
            if x.ndim < 3:  # one row for each picture: such products stay in float
                return
            step = (x.amax().clamp(min=0) - x.amin().clamp(max=0)) / 255
            off = nn.functional.linear((x / step).round() * step - x, module.weight)
            found.setdefault(name, []).append((off.norm(dim=-1) / output.norm(dim=-1).clamp(min=1e-9)).flatten())

        return hook

    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    hooks = [layer.register_forward_hook(keep(name)) for name, layer in layers.items()]
    try:
        with torch.no_grad():
            for batch in images.split(16):
                model(batch)
    finally:
        for each in hooks:
            each.remove()
    return {name: float(torch.cat(errors).median()) for name, errors in found.items()}


def largest_inputs(model: nn.Module, names: list[str], images: Tensor) -> dict[str, Tensor]:
    """For each of these layers, the largest absolute value that each of its input channels takes."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            now = inputs[0].flatten(0, -2).abs().amax(dim=0)
            found[name] = torch.maximum(found[name], now) if name in found else now

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    try:
        with torch.no_grad():  # inference mode would leave tensors that cannot be saved
            for batch in images.split(16):
                model(batch)
    finally:
        for each in hooks:
            each.remove()
    return found


def int8_dynamic(model: "onnx.ModelProto") -> bytes:
    """Products with weights in int8; ranges of activations are taken from each batch.

    Weights get seven bits, since on processors without int8 dot products sums of two products overflow 16 bits: with
    eight, ViT-Ti/16 loses ten points there, and nothing tells.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder, quiet():
        out = Path(folder) / "int8.onnx"
        quantize_dynamic(
            model, out, op_types_to_quantize=["MatMul"], per_channel=True, weight_type=QuantType.QInt8,
            reduce_range=True,
        )  # fmt: skip
        return out.read_bytes()


def int8_static(model: "onnx.ModelProto", pixels: Tensor) -> bytes:
    """The same with ranges of activations measured on pictures."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    with tempfile.TemporaryDirectory() as folder, quiet():
        out = Path(folder) / "int8.onnx"
        quantize_static(
            model, out, Pictures(pixels), quant_format=QuantFormat.QDQ, op_types_to_quantize=["MatMul"],
            per_channel=True, reduce_range=True, activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True, "OpTypesToExcludeOutputQuantization": ["MatMul"]},
        )  # fmt: skip
        return out.read_bytes()


class Pictures:
    """What ONNX Runtime's calibration asks for: one batch after the other, then None."""

    def __init__(self, pixels: Tensor) -> None:
        self.batches: Iterator[Any] = iter(pixels.split(8))

    def get_next(self) -> dict[str, np.ndarray] | None:
        batch = next(self.batches, None)
        return None if batch is None else {INPUT: batch.numpy()}
