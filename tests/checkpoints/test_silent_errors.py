"""A reader must never be wrong in silence: each wrong reading shows in the outputs, and none is reached unnoticed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.golden_cases import CASES, MODELS, PATHS, checkpoint_path, overrides_of, read_case, read_golden
from patchword.checkpoints import Checkpoint, read_checkpoint
from patchword.config import ViTConfig
from patchword.errors import CheckpointError, ConfigError, UnknownArchitectureError
from patchword.models import build_model

TOLERANCE = 3e-5  # of the golden cases
ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu")
EPSILONS = (1e-5, 1e-6, 1e-12)
ROPES = ("eva02", "pe", "axial", "dinov3")
# Stored sine-cosine positions are large, so that the first norm hardly sees an epsilon (the golden README).
LARGE_POSITIONS = ("bv_gap_sincos", "bv_tok_sincos_rep", "lucid_simple", "hf_vitmae", "mae_pretrain", "hf_aimv2_native")


def wrong_heads(config: ViTConfig) -> list[dict[str, object]]:
    """Other numbers of heads for the same tensors."""
    inner, unit = config.num_heads * config.attention_dim, 4 if config.has_rope else 1
    fits = [n for n in (1, 2, 3, 4, 6, 8) if n != config.num_heads and inner % (n * unit) == 0]
    if config.qk_norm or config.has_relative or config.rope == "mixed":
        return []  # their tensors show the number of heads
    pool = {"pool_heads": config.pool_heads or config.num_heads} if config.pooling in ("attention", "query") else {}
    return [{"num_heads": n, "head_dim": inner // n, "rope_periods": (), **pool} for n in fits[:2]]


def wrong_readings(name: str, config: ViTConfig) -> list[dict[str, object]]:
    """Configs that fit the same tensors, but compute something else."""
    wrong = wrong_heads(config)
    if not config.post_norm:
        wrong.append({"res_post_norm": not config.res_post_norm})
    if config.activation in ACTIVATIONS:
        wrong += [{"activation": kind} for kind in ACTIVATIONS if kind != config.activation]
    if name not in LARGE_POSITIONS:  # norms after the branches hardly see the smallest one, either
        wrong += [{"norm_eps": eps} for eps in EPSILONS[: 2 if config.res_post_norm else 3] if eps != config.norm_eps]
    plain: dict[str, object] = {"rope": "patchword", "rope_reference": None, "rope_base": None, "rope_periods": ()}
    if config.has_rope and config.rope != "mixed":
        kinds = [kind for kind in ROPES if kind != config.rope]
        wrong += [{**plain, "rope": kind} for kind in kinds]
        rest = config.pos_embed.removesuffix("rotary").removesuffix("+") or "none"
        wrong.append({**plain, "pos_embed": rest})
    if config.rope_reference and config.rope_reference != config.grid:
        wrong.append({"rope_reference": None})
    if config.pos_embed.startswith("sincos"):
        wrong.append({"pos_embed": "sincos" if config.pos_embed == "sincos_mae" else "sincos_mae"})
    return wrong


@torch.no_grad()
def outputs(checkpoint: Checkpoint, config: ViTConfig, images: Tensor) -> Tensor:
    model = build_model(config)
    model.load_state_dict(checkpoint.build_model().state_dict())
    return model.eval()(images)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_wrong_readings_show_in_the_outputs(name: str) -> None:
    checkpoint, golden = read_case(name).adapt(image_size=tuple(CASES[name]["input_size"])), read_golden(name)
    config = checkpoint.config
    assert isinstance(config, ViTConfig)
    right = outputs(checkpoint, config, golden["images"])
    torch.testing.assert_close(right, golden.get("logits", golden.get("features")), rtol=0, atol=TOLERANCE)
    for change in wrong_readings(name, config):
        wrong = outputs(checkpoint, config.replace(**change), golden["images"])
        assert (wrong - right).abs().max() > TOLERANCE, change


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_tensors_without_other_files(name: str, tmp_path: Path) -> None:
    """Without config.json and with a name that says nothing, a file is refused, read right, or read with a note."""
    original = checkpoint_path(name)
    bare = tmp_path / f"weights{original.suffix}"
    shutil.copy(original, bare)
    right = read_case(name).config
    for given in ({}, {"num_heads": right.num_heads}, overrides_of(CASES[name])):
        try:
            found = read_checkpoint(bare, **{"image_size": right.image_size, **given})
        except (CheckpointError, ConfigError):
            continue
        before, after = right.to_json(), found.config.to_json()
        wrong = [n for n in before if before[n] != after[n] and n != "pos_embed_resample"]
        noted = " ".join(note for note in found.notes if note.code == "architecture_assumed")
        assert all(f"{field}=" in noted for field in wrong), (wrong, noted)


TIMM = [name for name in MODELS if CASES[name]["family"] == "timm" and (PATHS[name] / "config.json").exists()]


@pytest.mark.parametrize("name", TIMM)
def test_unknown_architecture_of_timm(name: str, tmp_path: Path) -> None:
    shutil.copytree(PATHS[name], tmp_path / "model")
    (tmp_path / "model/golden.safetensors").unlink()
    path = tmp_path / "model/config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "architecture": "vit_mystery_patch8_32"}))
    with pytest.raises(UnknownArchitectureError, match="vit_mystery_patch8_32") as error:
        read_checkpoint(tmp_path / "model")
    right, given = read_case(name).config, {}
    while True:  # a rotary model is asked for the kind of its positions, once it is known to be one
        given |= {field: getattr(right, field) for field in error.value.missing}
        try:
            found = read_checkpoint(tmp_path / "model", **{**pool_options(right), **given}).config
            break
        except UnknownArchitectureError as another:
            error.value.missing = another.missing
    assert found.replace(pos_embed_resample=right.pos_embed_resample) == right


def pool_options(config: ViTConfig) -> dict[str, object]:
    """The options of pooling, of which only an architecture's name tells."""
    return {name: getattr(config, name) for name in ("pool_heads", "pool_prefix", "final_norm")}


@pytest.mark.parametrize("name", ["timm_token", "hf_vit", "hf_clip_vision", "timm_pe_core"])
@pytest.mark.parametrize("change", [{"num_heads": 1}, {"norm_eps": 1e-3}, {"activation": "gelu_tanh"}])
def test_fields_given_against_the_file_are_noted(name: str, change: dict, tmp_path: Path) -> None:
    codes = {note.code: note for note in read_case(name, **change).notes}
    assert next(iter(change)) in codes["field_overridden"]
    assert "field_overridden" not in {note.code for note in read_case(name).notes}


@pytest.mark.parametrize("place", ["file", "folder", "hub"])
def test_architecture_in_a_file_name(place: str, tmp_path: Path) -> None:
    """Weights of timm are often renamed to their architecture and lose their config.json."""
    names = {"file": "vit_base_patch16_clip_quickgelu_224.openai.safetensors"}
    names |= {"folder": "vit_base_patch16_clip_quickgelu_224.openai/model.safetensors"}
    names |= {"hub": "models--timm--vit_base_patch16_clip_quickgelu_224.openai/snapshots/abc/model.safetensors"}
    path = tmp_path / names[place]
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(checkpoint_path("timm_clip_quickgelu"), path)
    found = read_checkpoint(path, num_heads=3)
    assert found.config == read_case("timm_clip_quickgelu").config
    assert any(note.code == "architecture_by_name" and "quickgelu" in note for note in found.notes)
    assert found.provenance["architecture"] == "vit_base_patch16_clip_quickgelu_224"
