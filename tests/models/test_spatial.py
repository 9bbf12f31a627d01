"""Attention inside ResNets: each layer against loops over the equation of its paper, and whole models with it."""

import copy
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.command import run_in_process
from helpers.model_zoo import make_checkpoint, random_model
from helpers.tiny_trainer import config as run_config
from helpers.tiny_trainer import make_splits
from patchword import inspection
from patchword.checkpoints import read_checkpoint, write_checkpoint
from patchword.config import OptimConfig, ResNetConfig, ViTConfig
from patchword.config.describe_model import describe_differences
from patchword.engines import open_engine
from patchword.engines.capabilities import probe_capabilities
from patchword.engines.parity import measure_parity
from patchword.errors import CheckpointError, ConfigError
from patchword.inspection.capture import non_local_weights
from patchword.inspection.explain import methods_for
from patchword.models import adapt_model, build_model
from patchword.models.attention import AttentionBias, ScaledDotProductAttention
from patchword.models.spatial import AxialLayer, LocalAttention, NonLocal
from patchword.training.distributed import ProcessGroup
from patchword.training.optimizers import has_weight_decay, is_hidden_matrix
from patchword.training.trainer import Trainer

FORMS = ("gaussian", "embedded", "dot", "concat")
# Odd sizes, which strides round up, and a Non-local block that another unit precedes.
KINDS = {
    "ResNet": ResNetConfig(image_size=(14, 10), layers=(1, 2, 1), kind="cifar", num_classes=5),
    "BiT": ResNetConfig(image_size=(44, 36), layers=(1, 1, 1), num_classes=5),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "local": {"spatial": "local", "spatial_window": 5, "spatial_heads": 4},
    "axial": {"spatial": "axial", "spatial_heads": 4},
    "late": {"spatial": "local", "spatial_stage": 1, "non_local": "embedded"},
    **{form: {"non_local": form} for form in FORMS},
}
all_kinds = pytest.mark.parametrize("kind", KINDS)
all_options = pytest.mark.parametrize("option", OPTIONS)


# ---- layers against loops


def randomize(layer: nn.Module) -> nn.Module:
    """Returns the layer in float64, with random weights and statistics, also those that start at zero or one."""
    torch.manual_seed(0)
    layer = layer.double()
    for tensor in layer.parameters():
        nn.init.normal_(tensor, std=0.5)
    for name, tensor in layer.named_buffers():
        if name.endswith("running_mean"):
            nn.init.normal_(tensor)
        elif name.endswith("running_var"):
            nn.init.uniform_(tensor, 0.5, 2.0)
    return layer


def random_maps(*shape: int, scale: float = 1.0) -> Tensor:
    torch.manual_seed(1)
    return (scale * torch.randn(*shape, dtype=torch.float64)).requires_grad_()


def check_against(oracle: Callable[[Any, Tensor], Tensor], layer: nn.Module, x: Tensor) -> None:
    """Outputs and all gradients are those of the oracle."""
    found, expected = layer(x), oracle(layer, x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    probe = torch.randn_like(expected)
    inputs = [x, *layer.parameters()]
    gradients = [torch.autograd.grad((y * probe).sum(), inputs) for y in (found, expected)]
    for first, second in zip(*gradients, strict=True):
        assert first.isfinite().all() and first.any()
        torch.testing.assert_close(first, second, rtol=1e-8, atol=1e-8)


def project(layer: nn.Module, pixel: Tensor) -> Tensor:
    """Applies a 1x1 convolution to one pixel: (C) -> (C')."""
    return layer.weight[:, :, 0, 0] @ pixel


def project_heads(layer: Any, x: Tensor) -> list[Tensor]:
    """Returns queries, keys and values, (B, h, d, H, W) each; the first d channels are the first head's."""
    maps = [torch.einsum("oc,bchw->bohw", p.weight[:, :, 0, 0], x) for p in (layer.q, layer.k, layer.v)]
    return [y.unflatten(1, (layer.heads, -1)) for y in maps]


def average_pool(x: Tensor) -> Tensor:
    """Averages squares of 2x2 pixels; those at an odd border have fewer."""
    rows, columns = (range(0, size, 2) for size in x.shape[2:])
    squares = [[x[:, :, i : i + 2, j : j + 2].mean(dim=(2, 3)) for j in columns] for i in rows]
    return torch.stack([torch.stack(row, dim=-1) for row in squares], dim=-2)


def non_local_oracle(block: Any, x: Tensor) -> Tensor:
    """Wang et al. (2018), equations 1 to 6, for each pair of positions."""
    z, norm = x.clone(), block.norm
    for image, pixels in enumerate(x.flatten(2).mT):  # (N, C)
        for i, xi in enumerate(pixels):
            pair_values, total = [], torch.zeros((), dtype=x.dtype)
            for xj in pixels:
                a, b = (xi, xj) if block.form == "gaussian" else (project(block.theta, xi), project(block.phi, xj))
                f = torch.relu(block.pair_weight @ torch.cat([a, b])) if block.form == "concat" else a @ b
                f = torch.exp(f) if block.form in ("gaussian", "embedded") else f
                pair_values.append(f * project(block.g, xj))
                total = total + f if block.form in ("gaussian", "embedded") else torch.tensor(float(len(pixels)))
            y = project(block.out, sum(pair_values) / total)
            y = (y - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
            z[image, :, i // x.shape[3], i % x.shape[3]] = y + xi
    return z


@pytest.mark.parametrize("form", FORMS)
def test_non_local_sums_over_all_positions(form: Any) -> None:
    block = randomize(NonLocal(6, form, nn.BatchNorm2d(6))).eval()
    check_against(non_local_oracle, block, random_maps(2, 6, 3, 4))


@pytest.mark.parametrize("form", FORMS)
def test_new_non_local_block_is_the_identity(form: Any) -> None:
    """Exactly; its gamma gets a gradient, so that it can leave zero."""
    block, x = NonLocal(8, form, nn.BatchNorm2d(8)), torch.randn(2, 8, 5, 3)
    block.reset_parameters()
    nn.init.ones_(block.norm.weight)
    assert not torch.allclose(block(x), x, atol=0.1)
    block.reset_parameters()
    assert torch.equal(block(x), x)
    block(x).square().sum().backward()
    assert block.norm.weight.grad.any()


def local_oracle(layer: Any, x: Tensor) -> Tensor:
    """Ramachandran et al. (2019), equation 3: attention over all pixels, with a mask of the window."""
    (height, width), half = x.shape[2:], layer.window // 2
    q, k, v = (y.flatten(3).mT for y in project_heads(layer, x))  # (B, h, N, d) each
    outputs = []
    for i in range(height * width):
        seen, scores = [], []
        for j in range(height * width):
            dy, dx = j // width - i // width, j % width - i % width
            if max(abs(dy), abs(dx)) > half:
                continue
            r = torch.cat([layer.relative_rows[:, :, dy + half], layer.relative_columns[:, :, dx + half]], dim=1)
            scores.append((q[:, :, i] * k[:, :, j]).sum(dim=-1) + (q[:, :, i] * r).sum(dim=-1))
            seen.append(v[:, :, j])
        weights = torch.stack(scores, dim=-1).softmax(dim=-1)  # (B, h, pixels of the window)
        outputs.append(torch.einsum("bhm,bhmd->bhd", weights, torch.stack(seen, dim=2)).flatten(1))
    y = torch.stack(outputs, dim=-1).unflatten(2, (height, width))
    return y if isinstance(layer.pool, nn.Identity) else average_pool(y)


@pytest.mark.parametrize("window", [3, 5, 7])
@pytest.mark.parametrize(("size", "stride"), [((5, 6), 1), ((9, 7), 2), ((4, 8), 2), ((2, 3), 1)])
def test_local_attention_is_attention_in_a_window(window: int, size: tuple[int, int], stride: int) -> None:
    layer = randomize(LocalAttention(3, 8, window, heads=2, stride=stride))
    check_against(local_oracle, layer, random_maps(2, 3, *size))


def test_padding_gets_no_weight_whatever_the_scores() -> None:
    """Scores of real pixels are far below zero, the product with a padded key; also in float32."""
    layer, x = randomize(LocalAttention(3, 8, 5, heads=2)), random_maps(1, 3, 6, 5, scale=100.0)
    with torch.no_grad():
        layer.k.weight.copy_(-layer.q.weight)
        expected = local_oracle(layer, x)
        torch.testing.assert_close(layer(x), expected, rtol=1e-9, atol=1e-9)
        exact = layer.float()(x.float())
        torch.testing.assert_close(exact.double(), expected, rtol=0.01, atol=0.01 * float(expected.abs().max()))


@pytest.mark.parametrize("window", [3, 7])
def test_weights_of_real_pixels_sum_to_one(window: int) -> None:
    """If all values are equal, the output is that value, at borders too."""
    layer, x = randomize(LocalAttention(3, 8, window, heads=2)), random_maps(2, 3, 6, 7)
    with torch.no_grad():
        x[:, 0] = 1.0
        layer.v.weight[:, 1:] = 0
    expected = layer.v.weight[:, 0].expand(2, 8, 6, 7)
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


def axial_oracle(layer: Any, x: Tensor) -> Tensor:
    """Wang et al. (2020), equation 4, for each pair of pixels of a line."""
    x = x.mT if layer.vertical else x  # so that lines are rows
    (lines, length), heads, middle = x.shape[2:], layer.heads, layer.length - 1
    q, k, v = project_heads(layer, x)  # (B, h, d, lines, length) each
    terms = x.new_zeros(3, len(x), heads, lines, length, length)
    for i in range(length):
        for j in range(length):
            qi, kj, offset = q[..., i], k[..., j], j - i + middle
            terms[0, ..., i, j] = (qi * kj).sum(dim=2)
            terms[1, ..., i, j] = (qi * layer.relative_q[offset][:, None]).sum(dim=2)
            terms[2, ..., i, j] = (kj * layer.relative_k[offset][:, None]).sum(dim=2)
    mean, variance = layer.norm.running_mean, layer.norm.running_var
    if layer.training:
        mean, variance = terms.mean(dim=(1, 3, 4, 5)), terms.var(dim=(1, 3, 4, 5), correction=0)
    mean, variance, gamma = (t.reshape(3, 1, heads, 1, 1, 1) for t in (mean, variance, layer.norm.weight))
    weights = ((terms - mean) / (variance + layer.norm.eps).sqrt() * gamma).sum(dim=0).softmax(dim=-1)
    y = torch.zeros_like(v)
    for i in range(length):
        for j in range(length):
            value = v[..., j] + layer.relative_v[j - i + middle][:, None]
            y[..., i] = y[..., i] + weights[:, :, None, :, i, j] * value
    y = y.flatten(1, 2).mT if layer.vertical else y.flatten(1, 2)
    return y if isinstance(layer.pool, nn.Identity) else average_pool(y)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(("vertical", "stride", "length"), [(True, 1, 5), (False, 1, 4), (False, 2, 6), (True, 2, 5)])
def test_axial_layer_is_position_sensitive_attention(vertical: bool, stride: int, length: int, training: bool) -> None:
    """Length 6 is more than the lines have: the tables are cut."""
    layer = randomize(AxialLayer(3, 8, length, heads=2, stride=stride, vertical=vertical)).train(training)
    check_against(axial_oracle, layer, random_maps(2, 3, 5, 4))


@pytest.mark.parametrize("vertical", [False, True])
@torch.no_grad()
def test_axial_layer_without_positions_is_the_axial_attention_of_vit(vertical: bool) -> None:
    """With r = 0 and a neutral norm. ViT's even layers attend to rows, its odd ones to columns."""
    layer, x = randomize(AxialLayer(3, 8, 5, heads=2, vertical=vertical)).eval(), random_maps(2, 3, 5, 4)
    for table in (layer.relative_q, layer.relative_k, layer.relative_v, layer.norm.running_mean):
        nn.init.zeros_(table)
    nn.init.ones_(layer.norm.weight)
    nn.init.constant_(layer.norm.running_var, 1 - layer.norm.eps)
    grid = {"image_size": (5, 4), "patch_size": 1, "class_token": False, "pooling": "average"}
    config = ViTConfig(attention_pattern="axial", **grid)
    q, k, v = (y.flatten(3).mT for y in project_heads(layer, x))  # (B, h, N, d) each
    mask = AttentionBias(config, layer=int(vertical))().double()
    expected = ScaledDotProductAttention()(q * q.shape[-1] ** 0.5, k, v, mask)  # undoes its scaling
    torch.testing.assert_close(layer(x), expected.mT.flatten(1, 2).unflatten(2, (5, 4)))


# ---- whole models


def make_config(kind: str, option: str, **changes: Any) -> ResNetConfig:
    return KINDS[kind].replace(**OPTIONS[option], **changes)


def random_images(config: ResNetConfig, count: int = 2) -> Tensor:
    return torch.randn(count, config.in_channels, *config.image_size, generator=torch.Generator().manual_seed(1))


def layers_of(model: nn.Module, kind: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kind)]


@all_kinds
def test_attention_replaces_the_3x3_convolutions(kind: str) -> None:
    """From the stage on that the config names; a Non-local block is in the second last stage."""
    units, per_unit = KINDS[kind].layers, 2 if kind == "ResNet" else 1
    for option, count in (("local", sum(units)), ("late", sum(units[1:]))):
        model = build_model(make_config(kind, option))
        assert len(layers_of(model, LocalAttention)) == per_unit * count
        assert not [m for m in layers_of(model.stages[1:], nn.Conv2d) if m.kernel_size != (1, 1)]
    axial = layers_of(build_model(make_config(kind, "axial")), AxialLayer)
    assert [layer.vertical for layer in axial] == [True, False] * per_unit * sum(units)
    block = build_model(make_config(kind, "late")).stages[1][units[1] - 1]
    assert isinstance(block, NonLocal) and block.form == "embedded"
    single = build_model(make_config(kind, "dot", layers=(2,))).stages[0]
    assert [isinstance(module, NonLocal) for module in single] == [False, True, False]


@all_kinds
@all_options
def test_every_parameter_learns(kind: str, option: str) -> None:
    """A short step along the gradient reduces the loss. Tables of axial attention have no offset that never occurs."""
    config = make_config(kind, option)
    model, images, labels = random_model(config).train(), random_images(config, 4), torch.arange(4)
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name
        assert option != "axial" or ".relative_" not in name or parameter.grad.any(dim=1).all(), name
    square = sum(float(p.grad.square().sum()) for p in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * float(loss.detach()) / square * parameter.grad  # to first order, 1 % less loss
        assert F.cross_entropy(model(images), labels) < loss


@all_kinds
@all_options
@torch.no_grad()
def test_new_models(kind: str, option: str) -> None:
    """Positions are random, queries small, Non-local blocks the identity, and the head is zero."""
    torch.manual_seed(0)
    config = make_config(kind, option)
    model = build_model(config)
    assert torch.equal(model(random_images(config)), torch.zeros(2, 5))
    for name, parameter in model.named_parameters():
        if ".relative_" in name:
            width = 1 if option != "axial" else parameter.shape[-1]
            assert 0.7 < parameter.std() * width**0.5 < 1.4, name
    queries = [(layer.q, layer.q.out_channels // layer.heads) for layer in layers_of(model, LocalAttention)]
    for block in layers_of(model, NonLocal):
        assert not block.norm.weight.any()
        assert block.form != "concat" or block.pair_weight.std() > 0
        queries += [(block.theta, block.theta.out_channels)] if block.form == "embedded" else []
    for projection, width in queries:
        assert 0.9 < projection.weight.std() * (projection.in_channels * width) ** 0.5 < 1.1


@all_kinds
@pytest.mark.parametrize("option", ["local", "late", "dot"])
@torch.no_grad()
def test_windows_and_non_local_blocks_do_not_depend_on_the_size(kind: str, option: str) -> None:
    model = random_model(make_config(kind, option))
    for size in ((48, 64), (15, 11)):
        resized = adapt_model(model, image_size=size)
        assert resized.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(t, model.state_dict()[n]) for n, t in resized.state_dict().items())
        images = random_images(resized.config)
        torch.testing.assert_close(resized(images), model(images))


@all_kinds
@torch.no_grad()
def test_axial_positions_are_interpolated(kind: str) -> None:
    """Offsets are scaled around 0, which stays in place, down to lines of one pixel; nothing else changes."""
    model = random_model(make_config(kind, "axial"))
    for size in ((90, 20), (8, 14), (4, 4)):
        resized = adapt_model(model, image_size=size)
        for name, tensor in resized.state_dict().items():
            old = model.state_dict()[name]
            if ".relative_" not in name:
                assert torch.equal(tensor, old), name
                continue
            middle, last = len(tensor) // 2, len(old) // 2
            torch.testing.assert_close(tensor[middle], old[last])
            offsets = np.linspace(-last, last, len(tensor)) if len(tensor) > 1 else np.zeros(1)
            for column in (0, -1):
                expected = np.interp(offsets, np.arange(-last, last + 1), old[:, column].numpy())
                torch.testing.assert_close(tensor[:, column], torch.from_numpy(expected).float(), rtol=1e-4, atol=1e-5)
        assert resized(random_images(resized.config)).isfinite().all()


@torch.no_grad()
def test_axial_models_take_smaller_images_only() -> None:
    """As in progressive resizing: pixels at a distance attend as they did."""
    model = random_model(make_config("ResNet", "axial"))
    smaller = build_model(model.config.replace(image_size=(8, 7))).eval()
    state = model.state_dict()
    for name, table in smaller.state_dict().items():
        if ".relative_" in name:
            cut = (len(state[name]) - len(table)) // 2
            state[name] = state[name][cut : cut + len(table)]
    smaller.load_state_dict(state)
    images = random_images(smaller.config)
    torch.testing.assert_close(model(images), smaller(images))
    for size, line in (((15, 10), "14 pixels, not 15"), ((14, 11), "10 pixels, not 11")):
        with pytest.raises(ConfigError, match=rf"{line}; adapt_model\(model, image_size=") as error:
            model(torch.zeros(1, 3, *size))
        assert error.value.code == "image_too_large"


@all_kinds
@all_options
@torch.no_grad()
def test_checkpoints_keep_the_model(kind: str, option: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(make_config(kind, option))
    write_checkpoint(tmp_path / "model", checkpoint)
    found = read_checkpoint(tmp_path / "model")
    assert found.config == checkpoint.config
    images = random_images(checkpoint.config)
    assert found.tensors.keys() == checkpoint.tensors.keys()
    assert all(torch.equal(tensor, checkpoint.tensors[name]) for name, tensor in found.tensors.items())
    torch.testing.assert_close(found.build_model()(images), checkpoint.build_model()(images))
    if kind == "ResNet":
        name = next(n for n in checkpoint.tensors if ".relative_" in n or n.endswith(".g.weight"))
        tensors = {n: t for n, t in checkpoint.tensors.items() if n != name}
        write_checkpoint(tmp_path / "broken", dataclasses.replace(checkpoint, tensors=tensors))
        with pytest.raises(CheckpointError, match=re.escape(name)):
            read_checkpoint(tmp_path / "broken").build_model()


@pytest.mark.parametrize("option", ["axial", "late", "concat"])
def test_resumed_run_is_identical(option: str) -> None:
    """Positions have no weight decay and are not orthogonalized, as they are no maps between layers."""
    model = ResNetConfig(image_size=(8, 8), in_channels=1, layers=(1, 1), kind="cifar", **OPTIONS[option])
    config = run_config(model=model, optim=OptimConfig(name="muon", lr=1e-2), steps=6)
    whole, resumed = (Trainer(config, make_splits(), ProcessGroup(), fresh=fresh) for fresh in (True, False))
    whole.start_loader()
    for _ in range(3):
        whole.train_step(0.5)
    saved = copy.deepcopy((whole.checkpoint().tensors, whole.state_tensors()))
    resumed.restore(whole.step, *saved)
    resumed.start_loader()
    for _ in range(3):
        whole.train_step(0.5)
        resumed.train_step(0.5)
    assert all(torch.equal(t, resumed.model.state_dict()[name]) for name, t in whole.model.state_dict().items())
    tables = [(name, p) for name, p in whole.model.named_parameters() if ".relative_" in name]
    assert not [name for name, p in tables if has_weight_decay(name, p) or is_hidden_matrix(name, p)]


@pytest.mark.skipif(not probe_capabilities().bf16_works, reason="this processor cannot compute in bf16")
@all_options
def test_bf16_is_close_to_fp32(option: str) -> None:
    config = make_config("ResNet", option)
    model, images = random_model(config), random_images(config)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rounded = model(images).float()
    assert (rounded - model(images)).norm() < 0.05 * rounded.norm()


@pytest.mark.slow
@pytest.mark.parametrize("option", ["late", "axial"])
def test_onnx_computes_the_same(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any batch size, with a stride on odd sizes."""
    monkeypatch.setenv("PATCHWORD_CACHE", str(tmp_path))
    checkpoint = make_checkpoint(make_config("ResNet", option, image_size=(7, 9), layers=(1, 1)))
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 7, 9, 3), dtype=np.uint8))
    torch_engine, onnx_engine = (open_engine(name, checkpoint) for name in ("torch", "onnx"))
    for count in (1, 3):
        parity = measure_parity(torch_engine(pixels[:count]), onnx_engine(pixels[:count]))
        assert parity.within_tolerance(exact=True), parity


@all_kinds
@pytest.mark.parametrize("form", FORMS)
def test_weights_of_the_non_local_block_explain(kind: str, form: str) -> None:
    """Only if they are a softmax; the map is what positions attend to on average."""
    config = make_config(kind, form)
    model, images = random_model(config), random_images(config)
    assert methods_for(config) == (("gradcam", "attention") if form in ("gaussian", "embedded") else ("gradcam",))
    maps = inspection.explain(model, images, torch.tensor([0, 1]), "gradcam")
    assert maps.shape == (2, *config.stage_sizes[-1]) and np.isfinite(maps).all()
    inputs: list[Tensor] = []
    (block,) = layers_of(model, NonLocal)
    block.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    weights = non_local_weights(model, images)
    height, width = inputs[0].shape[2:]
    assert weights.shape == (2, height, width, height, width)
    torch.testing.assert_close(weights.flatten(3).flatten(1, 2), block.pairwise(inputs[0]))
    if form in ("dot", "concat"):
        with pytest.raises(ConfigError, match=r"'attention'.*\bgradcam\b"):
            inspection.explain(model, images, None, "attention")
        return
    torch.testing.assert_close(weights.sum(dim=(3, 4)), torch.ones(2, height, width))
    expected = weights.flatten(1, 2).mean(dim=1).detach().numpy()
    np.testing.assert_allclose(inspection.explain(model, images, None, "attention"), expected, rtol=1e-4, atol=1e-6)
    assert methods_for(config.replace(num_classes=0)) == ("attention",)


@pytest.mark.slow
def test_inspect_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = dataclasses.replace(make_checkpoint(make_config("ResNet", "late")), labels=tuple("abcde"))
    write_checkpoint(tmp_path / "model", checkpoint)
    Image.effect_noise((20, 16), 80).convert("RGB").save(tmp_path / "noise.png")
    done = run_in_process(capsys, "inspect", tmp_path / "model", tmp_path / "noise.png", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    shown = run_in_process(capsys, "show", tmp_path / "model").stdout
    assert "a Non-local block (embedded Gaussian)" in " ".join(shown.split())


def test_differences_are_described() -> None:
    assert describe_differences(KINDS["BiT"]) == {}
    assert describe_differences(make_config("BiT", "late")) == {
        "spatial": "attention in windows of 7 pixels (SASA) with 8 heads instead of 3x3 convolutions from stage 2 of 3",
        "non_local": "a Non-local block (embedded Gaussian)",
    }
    axial = describe_differences(make_config("BiT", "axial"))
    assert axial == {"spatial": "axial attention with 4 heads instead of 3x3 convolutions"}
    assert len({describe_differences(make_config("BiT", form))["non_local"] for form in FORMS}) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spatial": "global"}, r"model\.spatial .*'conv', 'local', 'axial'.*'global'"),
        ({"non_local": "cosine"}, r"model\.non_local .*'gaussian', 'embedded', 'dot', 'concat'.*'cosine'"),
        ({"spatial": "local", "spatial_window": 4}, r"model\.spatial_window .*odd.* 4\."),
        ({"spatial": "local", "spatial_window": 65}, r"model\.spatial_window .* 63.* 65\."),
        ({"spatial": "local", "spatial_heads": 3}, r"model\.spatial_heads 3: 16 channels .*divisor of 8"),
        ({"spatial": "axial", "spatial_heads": 16}, r"model\.spatial_heads 16: 16 channels .*divisor of 8"),
        ({"spatial": "axial", "spatial_heads": 0}, r"model\.spatial_heads .* 1 .* 0\."),
        ({"spatial": "axial", "spatial_stage": 3}, r"model\.spatial_stage .* 2.* 3\."),
        ({"spatial": "axial", "spatial_window": 5}, r"model\.spatial_window .*7.*'axial'.* 5\."),
        ({"spatial_heads": 4}, r"model\.spatial_heads .*8.*'conv'.* 4\."),
        ({"spatial_stage": 1}, r"model\.spatial_stage .*0.*'conv'.* 1\."),
    ],
    ids=str,
)
def test_contradictions_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KINDS["ResNet"].replace(**changes)
    assert KINDS["ResNet"].replace(spatial="axial", spatial_stage=1, spatial_heads=16), "later stages are wider"
