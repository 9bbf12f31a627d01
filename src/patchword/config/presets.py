"""Models by their published names ("Ti/16" ... "H/14", "R50+B/16", "R50x1"), and levels of augmentation.

Sizes: tables 1 and 6 of the ViT paper, and AugReg (Steiner et al., 2022) for Ti, S and their hybrids.
"""

import difflib
import re
from typing import Any

from ..errors import ConfigError
from . import AugmentConfig, ModelConfig, ResNetConfig, ViTConfig

SIZES: dict[str, dict[str, int]] = {
    "Ti": {"embed_dim": 192, "depth": 12, "mlp_dim": 768, "num_heads": 3},
    "S": {"embed_dim": 384, "depth": 12, "mlp_dim": 1536, "num_heads": 6},
    "B": {"embed_dim": 768, "depth": 12, "mlp_dim": 3072, "num_heads": 12},
    "L": {"embed_dim": 1024, "depth": 24, "mlp_dim": 4096, "num_heads": 16},
    "H": {"embed_dim": 1280, "depth": 32, "mlp_dim": 5120, "num_heads": 16},
}

# name: (units per ResNet stage, size, patch size on the feature map)
HYBRIDS: dict[str, tuple[tuple[int, ...], str, int]] = {
    "R+Ti/16": ((), "Ti", 8),
    "R26+S/32": ((2, 2, 2, 2), "S", 1),
    "R26+B/32": ((2, 2, 2, 2), "B", 1),
    "R50+B/16": ((3, 4, 9), "B", 1),
    "R50+L/32": ((3, 4, 6, 3), "L", 1),
}

# name: (units per stage, width factor)
RESNETS: dict[str, tuple[tuple[int, ...], int]] = {
    "R50x1": ((3, 4, 6, 3), 1),
    "R50x2": ((3, 4, 6, 3), 2),
    "R50x3": ((3, 4, 6, 3), 3),
    "R101x1": ((3, 4, 23, 3), 1),
    "R101x3": ((3, 4, 23, 3), 3),
    "R152x1": ((3, 8, 36, 3), 1),
    "R152x2": ((3, 8, 36, 3), 2),
    "R152x4": ((3, 8, 36, 3), 4),
    "R200x3": ((3, 24, 36, 3), 3),
}

PRESETS: tuple[str, ...] = (
    *("Ti/16", "S/16", "S/32", "B/8", "B/16", "B/32", "L/16", "L/32", "H/14"),
    *HYBRIDS,
    *RESNETS,
)

# RandAugment and mixup of AugReg
AUGMENTATIONS: dict[str, dict[str, float]] = {
    "none": {},
    "light": {"randaug_ops": 2, "randaug_magnitude": 10, "mixup": 0.2},
    "medium": {"randaug_ops": 2, "randaug_magnitude": 15, "mixup": 0.5},
    "strong": {"randaug_ops": 2, "randaug_magnitude": 20, "mixup": 0.8},
}


def preset(name: str, **changes: Any) -> ModelConfig:
    """Returns the config of a named model, with some fields changed: `preset("B/16", image_size=384)`.

    The five sizes take any patch size: "S/8" works as well as "S/16".
    """
    if name in RESNETS:
        layers, width_factor = RESNETS[name]
        return ResNetConfig(layers=layers, width_factor=width_factor).replace(**changes)
    if name in HYBRIDS:
        layers, size, patch_size = HYBRIDS[name]
        fields: dict[str, Any] = {"stem": "resnet", "stem_layers": layers, "patch_size": patch_size, **SIZES[size]}
    elif match := re.fullmatch(r"(Ti|S|B|L|H)/(\d{1,4})", name):
        fields = {"patch_size": int(match[2]), **SIZES[match[1]]}
    else:
        near = difflib.get_close_matches(name.removeprefix("ViT-"), PRESETS, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        known = f"Known: {', '.join(PRESETS)}; Ti, S, B, L and H take any patch size, as in 'S/8'."
        raise ConfigError(f"There is no model {name!r}.{hint} {known}", code="unknown_preset", field="model")
    return ViTConfig.from_json({**fields, **changes})


def augmentation(name: str, **changes: Any) -> AugmentConfig:
    """Returns a level of augmentation, with some fields changed: `augmentation("light", crop="shift")`.

    Four of the seven levels of "How to train your ViT?" (AugReg, Steiner et al., 2022): "none" is its none, "light" its
    light2, "medium" its medium2 and "strong" its strong2. As in AugReg, all of them, even "none", use random resized
    crops (5% of the area or more) and horizontal flips. big_vision trains S/16 and larger on ImageNet-1k with medium2.
    """
    if name not in AUGMENTATIONS:
        message = f"There is no augmentation {name!r}. Known: {', '.join(AUGMENTATIONS)}."
        raise ConfigError(message, code="unknown_preset", field="augment")
    return AugmentConfig(crop="resized", scale=(0.05, 1.0), flip=0.5).replace(**{**AUGMENTATIONS[name], **changes})
