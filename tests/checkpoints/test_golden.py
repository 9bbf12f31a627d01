"""Golden cases: outputs of the original code to 3e-5, and bit-identical files after a round trip."""

from pathlib import Path

import pytest
import torch
import transformers

from helpers.golden_cases import CASES, MODELS, checkpoint_path, overrides_of, read_case, read_golden
from patchword.checkpoints import read_checkpoint, write_checkpoint
from patchword.checkpoints.detect_format import load_source
from patchword.data.preprocess import CLIP_MEAN, HALF, IMAGENET_MEAN
from patchword.errors import ConversionError
from patchword.models.pos_embed import resample_grid

TOLERANCE = 3e-5  # the golden README: accepts correct code, rejects a wrong epsilon or GELU
SUFFIX = {"google": ".npz", "big_vision": ".npz"}
SUFFIX |= dict.fromkeys(("torchvision", "deit", "dinov2", "dinov3", "mae"), ".pth")
READ_ONLY = ("vit_pytorch", "open_clip")
# Tensors of other parts of a model, which are not read and so not written again.
OTHER_PARTS = ("text_model.", "text_projection.", "logit_", "decoder", "mask_token")

RESIZES = [name for name in CASES if name not in MODELS]


def test_number_of_cases() -> None:
    assert len(MODELS) == 37 + 47
    assert len(RESIZES) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_outputs(name: str) -> None:
    case, golden = CASES[name], read_golden(name)
    checkpoint = read_case(name)
    assert checkpoint.family == case["family"]
    checkpoint = checkpoint.adapt(image_size=tuple(case["input_size"]))
    model = checkpoint.build_model()
    with torch.no_grad():
        tokens = model.forward_features(golden["images"])
        outputs = {"tokens": tokens, "logits": model(golden["images"]), "pooled": model.forward_pool(tokens)}
        if case.get("distilled"):
            outputs["logits_cls"], outputs["logits_dist"] = model.forward_distilled(golden["images"])
            outputs["pooled"] = (tokens[:, 0] + tokens[:, 1]) / 2  # timm's feature; DeiT itself averages the logits
        elif checkpoint.config.projection_dim:
            without = checkpoint.adapt(projection_dim=None)  # the projection is optional
            outputs["pooled"] = without.build_model()(golden["images"])
    outputs["features"] = outputs["logits"]
    for output in set(golden) - {"images"}:
        torch.testing.assert_close(outputs[output], golden[output], rtol=0, atol=TOLERANCE, msg=f"{name}: {output}")


@pytest.mark.parametrize(
    ("name", "mean", "summary"),
    [
        ("hf_siglip_model_sparse", HALF, "squash to 32x32, bicubic"),
        ("hf_siglip2_vision", HALF, "squash to 32x32, bilinear"),
        ("hf_clip_vision", CLIP_MEAN, "resize to 32x32, crop 32x32, bicubic"),
        ("hf_dinov3", IMAGENET_MEAN, "squash to 32x32, bilinear"),
        ("hf_vit_msn", IMAGENET_MEAN, "squash to 32x32, bilinear"),
        ("open_clip_bin", CLIP_MEAN, "resize to 32x48, crop 32x48, bicubic"),
        ("open_clip_timm_siglip", HALF, "squash to 32x32, bicubic"),
        ("timm_eva02_fused", CLIP_MEAN, "resize to 35x35, crop 32x32, bicubic"),
        ("timm_dinov3", IMAGENET_MEAN, "resize to 32x32, crop 32x32, bicubic"),
        ("timm_beit", HALF, "resize to 35x35, crop 32x32, bicubic"),
        ("mae_finetuned", IMAGENET_MEAN, "resize to 36x36, crop 32x32, bicubic"),
    ],
)
def test_preprocessing(name: str, mean: tuple[float, ...], summary: str) -> None:
    """What the file beside the checkpoint states, else the default of the family, with a note."""
    checkpoint = read_case(name)
    assert checkpoint.preprocess is not None
    assert checkpoint.preprocess.mean == pytest.approx(mean)
    assert checkpoint.preprocess.summary().startswith(summary + ",")
    noted = "preprocess_assumed" in {note.code for note in checkpoint.notes}
    assert noted == (CASES[name]["family"] == "mae")


@pytest.mark.parametrize("change", [{"norm_eps": 1e-5}, {"activation": "gelu"}])
def test_tolerance_can_fail(change: dict) -> None:
    """The tolerance rejects a wrong epsilon and a wrong GELU."""
    golden = read_golden("google_token")
    model = read_case("google_token", **change).build_model()
    with torch.no_grad():
        assert (model(golden["images"]) - golden["logits"]).abs().max() > TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in MODELS if CASES[n]["family"] not in READ_ONLY])
def test_round_trip_through_patchword(name: str, tmp_path: Path) -> None:
    """Conversion to patchword and back gives bit-identical tensors."""
    family = CASES[name]["family"]
    write_checkpoint(tmp_path / "ours", read_case(name))
    back = tmp_path / ("back" + SUFFIX.get(family, ""))
    write_checkpoint(back, read_checkpoint(tmp_path / "ours"), family)
    assert_same_file(checkpoint_path(name), back)
    assert read_checkpoint(back, **overrides_of(CASES[name])).config == read_case(name).config


@pytest.mark.slow
@pytest.mark.parametrize("name", ["google_token", "timm_token", "hf_vit", "tv_vit"])
@pytest.mark.parametrize("through", ["google", "timm", "transformers", "torchvision"])
def test_through_another_format(name: str, through: str, tmp_path: Path) -> None:
    """Conversion to another format and back gives bit-identical tensors."""
    family = CASES[name]["family"]
    there, back = tmp_path / ("there" + SUFFIX.get(through, "")), tmp_path / ("back" + SUFFIX.get(family, ""))
    write_checkpoint(there, read_case(name), through)
    heads = {"num_heads": CASES[name]["heads"]}
    write_checkpoint(back, read_checkpoint(there, **heads), family)
    assert_same_file(checkpoint_path(name), back)


@pytest.mark.parametrize("name", ["hf_clip_model", "hf_clip_vision_proj", "open_clip_bin", "open_clip_quickgelu"])
def test_projection_of_clip_through_timm(name: str, tmp_path: Path) -> None:
    """In timm, the projection is a head with a bias of zeros; it is not read as a classifier."""
    before = read_case(name)
    write_checkpoint(tmp_path / "timm", before, "timm")
    after = read_checkpoint(tmp_path / "timm")
    assert (after.config.projection_dim, after.config.num_classes) == (before.config.projection_dim, 0)
    assert torch.equal(after.tensors["pre_logits.weight"], before.tensors["pre_logits.weight"])
    with torch.no_grad():
        features = after.build_model()(read_golden(name)["images"])
    torch.testing.assert_close(features, read_golden(name)["features"], rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["google_token", "timm_token", "hf_vit", "tv_vit", "bv_tok_learn", "deit3_ls"])
@pytest.mark.parametrize("to", ["google", "big_vision", "timm", "transformers", "torchvision", "deit"])
def test_same_function_in_every_format(name: str, to: str, tmp_path: Path) -> None:
    """Converted models compute the original outputs, given the fields that the format does not store."""
    checkpoint, out = read_case(name), tmp_path / ("out" + SUFFIX.get(to, ""))
    if name == "deit3_ls" and to not in ("timm", "deit"):  # no LayerScale, or (transformers) with another pooling
        with pytest.raises(ConversionError, match=to):
            write_checkpoint(out, checkpoint, to)
        assert not list(tmp_path.iterdir())
        return
    write_checkpoint(out, checkpoint, to)
    config = checkpoint.config
    overrides = {"num_heads": config.num_heads, "activation": config.activation, "norm_eps": config.norm_eps}
    golden = read_golden(name)
    with torch.no_grad():
        logits = read_checkpoint(out, **overrides).build_model()(golden["images"])
    torch.testing.assert_close(logits, golden["logits"], rtol=0, atol=TOLERANCE)


def assert_same_file(a: Path, b: Path) -> None:
    first, second = load_source(a), load_source(b)
    expected = {n: t for n, t in first.tensors.items() if not is_other_part(n, first.tensors)}
    assert expected.keys() == second.tensors.keys()
    assert first.wrapped == second.wrapped
    for name, tensor in expected.items():
        assert tensor.dtype == second.tensors[name].dtype, name
        assert torch.equal(tensor, second.tensors[name]), name


def is_other_part(name: str, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether a tensor is not one of the image tower; DINO's mask token is kept, as its code requires it."""
    is_mask_token = name == "mask_token" and "decoder_embed.weight" not in tensors
    return name.endswith("position_ids") or (name.startswith(OTHER_PARTS) and not is_mask_token)


@pytest.mark.parametrize("name", RESIZES)
def test_position_resizing(name: str) -> None:
    golden = read_golden(name)
    mode = {"google": "google", "big_vision": "google", "timm": "timm", "torchvision": "torchvision"}
    jobs = sorted({key.rsplit(".", 1)[0] for key in golden})
    for job in jobs:
        before, after = golden[f"{job}.input"][0], golden[f"{job}.output"][0]
        sizes, _, prefix = job.partition("_prefix")
        old, new = (tuple(map(int, size.split("x"))) for size in sizes.split("_to_"))
        k = int(prefix) if prefix else len(before) - old[0] * old[1]
        found = resample_grid(before[k:], old, new, mode[CASES[name]["family"]])
        torch.testing.assert_close(found, after[k:], rtol=0, atol=TOLERANCE, msg=f"{name} {job}")
        torch.testing.assert_close(before[:k], after[:k], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["dinov3_base", "hf_dinov3", "timm_dinov3_token_other_size"])
@pytest.mark.parametrize("to", ["dinov3", "transformers", "timm"])
def test_dinov3_through_every_format(name: str, to: str, tmp_path: Path) -> None:
    """Their mask tokens have different shapes; a head is stored by timm alone."""
    checkpoint, out = read_case(name).adapt(num_classes=0), tmp_path / ("m" + SUFFIX.get(to, ""))
    write_checkpoint(out, checkpoint, to)
    images = read_golden("hf_dinov3")["images"]
    expected = checkpoint.adapt(image_size=32).build_model()
    with torch.no_grad():
        features = read_checkpoint(out, image_size=32).build_model()(images)
        torch.testing.assert_close(features, expected(images), rtol=0, atol=TOLERANCE)
    shape = load_source(out).tensors.get({"dinov3": "mask_token"}.get(to, "embeddings.mask_token"))
    assert to == "timm" or (shape is not None and shape.ndim == (2 if to == "dinov3" else 3))


def test_clip_of_open_clip_to_transformers(tmp_path: Path) -> None:
    """One norms all tokens, the other the class token alone, which is the same function."""
    write_checkpoint(tmp_path / "clip", read_case("open_clip_quickgelu"), "transformers")
    theirs = transformers.CLIPVisionModelWithProjection.from_pretrained(tmp_path / "clip").eval()
    golden = read_golden("open_clip_quickgelu")
    with torch.no_grad():
        features = theirs(pixel_values=golden["images"]).image_embeds
    torch.testing.assert_close(features, golden["features"], rtol=0, atol=TOLERANCE)


def test_refusals_name_the_nearest_class(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"model with num_classes=7 \(only 0\)\.$"):
        write_checkpoint(tmp_path / "m", read_case("timm_dinov3_token_other_size"), "transformers")
