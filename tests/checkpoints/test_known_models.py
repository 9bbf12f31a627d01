"""The table of well-known models, and the lists that it stands beside."""

import re
from collections import Counter

import pytest

from patchword.checkpoints import WRITABLE, read_checkpoint
from patchword.checkpoints.detect_format import FAMILIES
from patchword.checkpoints.hub import parse_reference
from patchword.checkpoints.known_models import USES, KnownModel, bundled_models, families, hub_models
from patchword.config import ViTConfig
from patchword.config.presets import preset
from patchword.models import tensor_shapes


@pytest.mark.parametrize("model", hub_models(), ids=lambda model: model.reference)
def test_rows_are_plausible(model: KnownModel) -> None:
    parse_reference(model.reference)
    assert model.family in {family.name for family in FAMILIES}
    assert 1e6 < model.parameters < 1e10
    assert 128 <= model.image_size <= 1024
    assert model.license == "not stated" or re.fullmatch(r"[a-z0-9.-]+", model.license)
    assert (model.classes == 1000) == (model.use == USES["imagenet"])
    if patch := re.search(r"patch-?(\d+)", model.reference):
        assert model.image_size % int(patch[1]) == 0


def test_names_are_unique_and_uses_are_together() -> None:
    models = hub_models()
    assert max(Counter(model.reference for model in models).values()) == 1
    uses = [model.use for model in models]
    assert len(models) >= 40
    assert sorted(uses, key=list(USES.values()).index) == uses


def test_models_of_meta_with_dinov3_are_gated() -> None:
    gated = {model.reference for model in hub_models() if model.gated}
    assert gated == {m.reference for m in hub_models() if m.reference.startswith("hf:facebook/dinov3-")} != set()


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", preset("Ti/16")),
        ("timm/vit_base_patch16_224.augreg_in21k", preset("B/16", num_classes=21843)),
        ("google/vit-base-patch16-224", preset("B/16")),
        ("facebook/deit-base-distilled-patch16-224", preset("B/16", distillation=True)),
        ("facebook/vit-msn-base", preset("B/16", num_classes=0)),
        ("facebook/dinov2-base", preset("B/14", image_size=518, num_classes=0, layer_scale=1.0)),
    ],
)
def test_parameters_are_those_of_our_model(name: str, config: ViTConfig) -> None:
    (model,) = (model for model in hub_models() if model.reference == f"hf:{name}")
    assert model.parameters == sum(tensor.numel() for tensor in tensor_shapes(config).values())


def test_bundled_models() -> None:
    (model,) = bundled_models()
    checkpoint = read_checkpoint(model.reference)
    assert model.reference == "patchword:cifar10"
    assert model.parameters == sum(tensor.numel() for tensor in checkpoint.tensors.values())
    assert (model.image_size, model.classes) == (32, 10)


def test_families() -> None:
    rows = {row.name: row for row in families()}
    assert list(rows) == ["patchword", *dict.fromkeys(family.name for family in FAMILIES)]
    assert {name for name, row in rows.items() if row.writable} == {"patchword", *WRITABLE}
    assert all(row.description for row in rows.values())
