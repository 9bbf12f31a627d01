"""What only the name of a timm architecture says, because its tensors do not show it.

Neither names nor shapes of tensors tell the kind of GELU, the epsilon of norms, the number of heads, whether norms
follow the branches, or how rotary positions are computed. timm knows these from the name of the model's entry point,
such as "vit_base_patch16_siglip_224". The table was written from timm 1.0.31.
"""

import re
from itertools import pairwise
from pathlib import PurePath
from typing import Any

Fields = dict[str, Any]

CLIP: Fields = {"norm_eps": 1e-5, "pooling": "class", "statistics": "clip"}
SIGLIP: Fields = {"pooling": "attention", "resize": "squash"}
AVERAGE: Fields = {"pooling": "average"}
IMAGENET: Fields = {"statistics": "imagenet"}
EVA02: Fields = {"rope": "eva02", "rope_reference": (16, 16), "statistics": "clip"}
PE: Fields = {"rope": "pe", "norm_eps": 1e-5}
PE_DENSE: Fields = {**PE, **AVERAGE, "rope_reference": (32, 32), "final_norm": False}
PE_CORE: Fields = {**PE, "pooling": "attention", "pool_prefix": True, "pool_heads": 8, "resize": "squash"}
DINOV3: Fields = {"rope": "dinov3", "norm_eps": 1e-5, **IMAGENET}
NAFLEX: Fields = {"pos_embed_resample": "timm"}

SIZES = (
    "tiny|xsmall|wee|little|small|medium|mediumd|betwixt|base|so150m|so150m2|large|so400m|huge|giant|giantopt|gigantic"
)
_VIT = rf"vit_({SIZES})_patch\d+"

# Pattern of the whole name, and its fields of ViTConfig and Preprocess. The first match counts.
ARCHITECTURES: tuple[tuple[str, Fields], ...] = (
    (rf"{_VIT}(_plus)?_\d+(_miil)?", {}),
    (r"vit_(tiny_r_s16_p8|small_r26_s32|base_r26_s32|base_r50_s16|large_r50_s32)_\d+", {}),
    (r"vit_small_patch16_36x1_224", {}),
    (rf"{_VIT}(_reg\d)?_gap_\d+", AVERAGE),
    (rf"{_VIT}_reg\d_map_\d+", {"pooling": "attention"}),
    (rf"{_VIT}(_plus)?_clip_quickgelu_\d+", {**CLIP, "activation": "quick_gelu"}),
    (rf"{_VIT}(_plus)?_clip_\d+", CLIP),
    (r"vit_(so400m_patch16|giantopt_patch16)_siglip_gap_\d+", {**SIGLIP, **AVERAGE, "activation": "gelu_tanh"}),
    (
        r"vit_base_patch32_siglip_gap_256|vit_large_patch16_siglip_gap_512",
        {**SIGLIP, **AVERAGE, "activation": "gelu_tanh"},
    ),
    (rf"{_VIT}_siglip_gap_\d+", {**SIGLIP, **AVERAGE}),
    (r"vit_(so400m_patch16|giantopt_patch16)_siglip_\d+", {**SIGLIP, "activation": "gelu_tanh"}),
    (r"vit_base_patch32_siglip_256|vit_large_patch16_siglip_512", {**SIGLIP, "activation": "gelu_tanh"}),
    (rf"{_VIT}_siglip_\d+", SIGLIP),
    (rf"{_VIT}(_reg\d)?_(dinov2|tipsv2)", IMAGENET),
    (r"vit_base_patch16_rpn_224", {**AVERAGE, "res_post_norm": True}),
    (r"vit_intern300m_patch14_448", {**IMAGENET, "final_norm": False}),
    (r"flexivit_(small|base|large)", {}),
    (r"deit3?_(tiny|small|medium|base|large|huge)(_distilled)?_patch\d+_\d+", IMAGENET),
    (r"eva_large_patch14_\d+", {**AVERAGE, "statistics": "clip"}),
    (r"aimv2_(large|huge|1b|3b)_patch14_\d+", {**AVERAGE, "norm_eps": 1e-5, "statistics": "clip"}),
    (r"beit3_(base|large|giant)_patch\d+_\d+", {**AVERAGE, "norm_eps": 1e-5}),
    (r"beit(v2)?_(base|large)_patch16_\d+", AVERAGE),
    (r"test_vit", {}),
    (r"test_vit2|test_vit4", AVERAGE),
    (r"test_vit3", {"pooling": "attention", "pool_prefix": True}),
    # timm's class Eva
    (r"eva_giant_patch14_clip_224", {"statistics": "clip"}),
    (r"eva_giant_patch14_\d+", {**AVERAGE, "statistics": "clip"}),
    (r"eva02_(tiny|small|base|large)_patch14_\d+", {**EVA02, **AVERAGE}),
    (r"eva02_(base|large)_patch\d+_clip_\d+", EVA02),
    (r"eva02_enormous_patch14_clip_224", {"res_post_norm": True, "statistics": "clip"}),
    (rf"{_VIT}_rope_reg\d_gap_256", {**AVERAGE, "rope": "eva02", "rope_reference": (16, 16)}),
    (r"vit_pe_core_base_patch16_\d+", {**PE_CORE, "rope_reference": (14, 14)}),
    (r"vit_pe_core_gigantic_patch14_\d+", {**PE_CORE, "rope_reference": (32, 32)}),
    (r"vit_pe_core_(tiny|small|large)_patch\d+_\d+", {**PE_CORE, "rope_reference": (24, 24)}),
    (rf"vit_pe_(lang|spatial)_({SIZES})_patch\d+_\d+", PE_DENSE),
    (r"vit_(small|base|large)_patch16_rope_mixed(_ape)?_224", {"rope": "mixed", **IMAGENET}),
    (r"vit_(small|base|large)_patch16_rope(_ape)?_224", {"rope": "axial", **IMAGENET}),
    (r"vit_(tiny|small|small_plus|base|large|huge_plus|7b)_patch16_dinov3(_qkvb)?", {**DINOV3, **AVERAGE}),
    (r"vit_(small|base|large|giant)_patch16_lingbot", DINOV3),
    # timm's class NaFlexVit
    (r"naflexvit_(base|so400m)_patch16_siglip", {**SIGLIP, "activation": "gelu_tanh", "pos_embed_resample": "siglip2"}),
    (r"naflexvit_\w+_map", {**NAFLEX, "pooling": "attention"}),
    (r"naflexvit_(base_patch16|so150m2_patch16_reg1)_gap", {**NAFLEX, **AVERAGE}),
)

# The number of heads by the word for the size, and by the whole name where it differs.
NUM_HEADS = {"tiny": 3, "xsmall": 4, "wee": 4, "little": 5, "small": 6, "small_plus": 6, "medium": 8, "mediumd": 8}
NUM_HEADS |= {"betwixt": 10, "base": 12, "so150m2": 13, "so150m": 14, "large": 16, "so400m": 16, "intern300m": 16}
NUM_HEADS |= {"huge": 16, "giant": 16, "giantopt": 16, "gigantic": 16, "enormous": 16, "huge_plus": 20, "7b": 32}
SPECIAL_NUM_HEADS = (
    (r"vit_base_patch16_gap_224", 16),
    (r"vit_base_patch\d+_plus_.*", 14),
    (r"vit_giant_patch\d+(_reg\d)?_(dinov2|tipsv2|lingbot)", 24),
    (r"aimv2_large_.*", 8),
    (r"aimv2_huge_.*", 12),
    (r"aimv2_1b_.*", 16),
    (r"aimv2_3b_.*", 24),
    (r"test_vit2?", 2),
    (r"test_vit[34]", 3),
)
PREPROCESS_FIELDS = ("statistics", "resize")


def architecture_fields(name: str) -> tuple[Fields, Fields] | None:
    """Return what the name of an architecture says: fields of ViTConfig, and of Preprocess; None if it is unknown."""
    for pattern, entry in ARCHITECTURES:
        if re.fullmatch(pattern, name):
            fields = {"activation": "gelu", "norm_eps": 1e-6, "res_post_norm": False, "num_heads": num_heads(name)}
            fields |= {field: value for field, value in entry.items() if field not in PREPROCESS_FIELDS}
            return fields, {field: entry[field] for field in PREPROCESS_FIELDS if field in entry}
    return None


def size_in_name(name: str) -> int | None:
    """Return the image size at the end of the name of an architecture, as in vit_so400m_patch14_siglip_384."""
    size = re.search(r"_(\d+)$", name)
    return int(size[1]) if size else None


def num_heads(name: str) -> int:
    """Return the number of heads of a known architecture."""
    for pattern, heads in SPECIAL_NUM_HEADS:
        if re.fullmatch(pattern, name):
            return heads
    words = name.split("_")
    pairs = ["_".join(pair) for pair in pairwise(words)]
    return next(NUM_HEADS[word] for word in (*pairs, *words) if word in NUM_HEADS)


def name_in_path(path: PurePath) -> tuple[str | None, str]:
    """Return the known architecture and the tag that a file or its directory is named after: "NAME.TAG.safetensors"."""
    snapshot = path.parents[2].name if len(path.parents) > 2 else ""  # models--timm--NAME.TAG/snapshots/COMMIT/file
    for part in (path.name, path.parent.name, snapshot):
        name, _, rest = part.removeprefix("models--timm--").partition(".")
        if architecture_fields(name):
            return name, rest.split(".")[0]
    return None, ""
