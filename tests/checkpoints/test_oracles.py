"""Parity with transformers and vit-pytorch: files with random weights give the same outputs."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from patchword.checkpoints import read_checkpoint, write_checkpoint
from patchword.config import ResNetConfig
from patchword.errors import UnknownArchitectureError
from patchword.models import ResNet, build_model

TOLERANCE = 3e-5
SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}

FAMILIES = {
    "vit": (transformers.ViTConfig, "ViTForImageClassification", {"intermediate_size": 96}),
    "vit with tanh GELU, 1 channel": (
        transformers.ViTConfig,
        "ViTForImageClassification",
        {"intermediate_size": 96, "hidden_act": "gelu_pytorch_tanh", "num_channels": 1, "layer_norm_eps": 1e-6},
    ),
    "vit without head": (transformers.ViTConfig, "ViTModel", {"intermediate_size": 96}),
    "deit with two heads": (
        transformers.DeiTConfig,
        "DeiTForImageClassificationWithTeacher",
        {"intermediate_size": 96},
    ),
    "deit with one head": (transformers.DeiTConfig, "DeiTForImageClassification", {"intermediate_size": 96}),
    "dinov2": (transformers.Dinov2Config, "Dinov2ForImageClassification", {"mlp_ratio": 2}),
    "dinov2 with swiglu": (
        transformers.Dinov2Config,
        "Dinov2ForImageClassification",
        {"mlp_ratio": 4, "use_swiglu_ffn": True},
    ),
    "dinov2 without head": (transformers.Dinov2Config, "Dinov2Model", {"mlp_ratio": 2}),
    "dinov2 with registers": (
        transformers.Dinov2WithRegistersConfig,
        "Dinov2WithRegistersForImageClassification",
        {"mlp_ratio": 2, "num_register_tokens": 4},
    ),
}


def random_model(kind: str) -> nn.Module:
    """Build their model with weights large enough to reveal a wrong epsilon or GELU."""
    config_class, model_class, changes = FAMILIES[kind]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config_class(**SMALL, num_labels=7, **changes)).eval()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=0.03 if "embeddings" in name else 0.3)
    return model


def their_outputs(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits (or pooled features) and the tokens."""
    base = getattr(model, model.base_model_prefix, model)
    with torch.no_grad():
        tokens = base(images)
        output = tokens.pooler_output if base is model else model(images).logits
    return output, tokens.last_hidden_state


@pytest.mark.parametrize("kind", FAMILIES)
def test_transformers_to_ours(kind: str, tmp_path: Path) -> None:
    theirs = random_model(kind)
    theirs.save_pretrained(tmp_path / "theirs")
    checkpoint = read_checkpoint(tmp_path / "theirs")
    ours = checkpoint.build_model()
    images = torch.randn(2, checkpoint.config.in_channels, 32, 32)
    logits, tokens = their_outputs(theirs, images)
    with torch.no_grad():
        torch.testing.assert_close(ours.forward_features(images), tokens, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(ours(images), logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", FAMILIES)
def test_ours_to_transformers(kind: str, tmp_path: Path) -> None:
    """Transformers loads our files without missing or unexpected tensors, and gives the same outputs."""
    theirs = random_model(kind)
    theirs.save_pretrained(tmp_path / "theirs")
    write_checkpoint(tmp_path / "ours", read_checkpoint(tmp_path / "theirs"))
    write_checkpoint(tmp_path / "back", read_checkpoint(tmp_path / "ours"), "transformers")
    again, info = type(theirs).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    images = torch.randn(2, theirs.config.num_channels, 32, 32)
    for before, after in zip(their_outputs(theirs, images), their_outputs(again.eval(), images), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("kind", ["vit", "dinov2", "dinov2 with registers"])
@pytest.mark.parametrize("size", [(48, 48), (16, 64)])
def test_other_image_sizes_as_transformers(kind: str, size: tuple[int, int], tmp_path: Path) -> None:
    theirs = random_model(kind)
    theirs.save_pretrained(tmp_path)
    ours = read_checkpoint(tmp_path, image_size=size).build_model()
    images = torch.randn(2, 3, *size)
    options = {"interpolate_pos_encoding": True} if kind == "vit" else {}
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images, **options).logits, rtol=0, atol=TOLERANCE)


def vit_pytorch(module: str) -> types.ModuleType:
    """Import one file of vit-pytorch; its package's __init__ would import torchvision."""
    package = importlib.util.find_spec("vit_pytorch")
    assert package is not None, "make installs vit-pytorch for this test"
    assert package.submodule_search_locations
    path = Path(package.submodule_search_locations[0]) / f"{module}.py"
    spec = importlib.util.spec_from_file_location(f"oracle_{module}", path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.parametrize("kind", ["class", "mean", "simple", "wide heads"])
def test_vit_pytorch_to_ours(kind: str, tmp_path: Path) -> None:
    arguments = dict(image_size=32, patch_size=8, num_classes=7, dim=48, depth=2, heads=3, mlp_dim=96, dim_head=16)
    if kind == "wide heads":
        arguments |= {"heads": 2, "dim_head": 64}  # 128 channels of attention in a model of width 48
    torch.manual_seed(0)
    if kind == "simple":
        theirs = vit_pytorch("simple_vit").SimpleViT(**arguments).eval()
    else:
        theirs = vit_pytorch("vit").ViT(**arguments, pool="mean" if kind == "mean" else "cls").eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    torch.save(theirs.state_dict(), tmp_path / "model.pt")
    heads = {"head_dim": 64} if kind == "wide heads" else {"num_heads": 3}
    with pytest.raises(UnknownArchitectureError, match="num_heads"):  # dim_head=64 is a default, not in the file
        read_checkpoint(tmp_path / "model.pt")
    overrides = {**heads, **({"image_size": 32} if kind == "simple" else {})}
    ours = read_checkpoint(tmp_path / "model.pt", **overrides).build_model()
    images, tokens = torch.randn(2, 3, 32, 32), []
    theirs.transformer.register_forward_hook(lambda m, i, o: tokens.append(o))
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(ours.forward_features(images), tokens[0], rtol=0, atol=TOLERANCE)


def test_bit_resnet_as_transformers() -> None:
    """Our BiT against transformers', weight by weight, with BiT's epsilon of the weight standardization."""
    config = transformers.BitConfig(depths=[1, 2, 1], hidden_sizes=[256, 512, 1024], embedding_size=64)
    torch.manual_seed(0)
    theirs = transformers.BitModel(config).eval()
    ours = build_model(ResNetConfig(image_size=64, layers=(1, 2, 1), num_classes=0)).eval()
    for module in theirs.modules():
        if hasattr(module, "eps") and isinstance(module, nn.Conv2d):
            module.eps = 1e-10
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours.load_state_dict(bit_state(theirs.state_dict(), ours))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        feature_map = theirs(images).last_hidden_state
        torch.testing.assert_close(ours.feature_map(images), feature_map, rtol=1e-4, atol=1e-4)


def bit_state(theirs: dict[str, Tensor], ours: ResNet) -> dict[str, Tensor]:
    state = {"conv.weight": theirs["embedder.convolution.weight"]}
    for suffix in ("weight", "bias"):
        state[f"norm.{suffix}"] = theirs[f"norm.{suffix}"]
    for name in ours.state_dict():
        if name.startswith("stages."):
            _, stage, unit, module, suffix = name.split(".")
            their_module = "downsample.conv" if module == "shortcut" else module
            state[name] = theirs[f"encoder.stages.{stage}.layers.{unit}.{their_module}.{suffix}"]
    return state
