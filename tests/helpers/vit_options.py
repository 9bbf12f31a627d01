"""A small ViT with every option of the config, one at a time."""

import torch
from torch import Tensor, nn

from patchword.config import ViTConfig
from patchword.models import ViT, build_model

BASE = ViTConfig(image_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=3, mlp_dim=96, num_classes=5)
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "learned_2d": {"pos_embed": "learned_2d"},
    "relative": {"pos_embed": "relative", "pooling": "average"},  # the class token has no offset
    "sincos": {"pos_embed": "sincos"},
    "rotary": {"pos_embed": "rotary"},
    "none": {"pos_embed": "none"},
    "axial": {"attention_pattern": "axial"},
    "local": {"attention_pattern": "local", "window_size": 3},
    "average": {"pooling": "average", "class_token": False},
    "fc_norm": {"pooling": "average", "norm_after_pool": True},
    "map": {"pooling": "attention", "class_token": False},
    "class+average": {"pooling": "class+average"},
    "registers": {"num_registers": 4},
    "distillation": {"distillation": True},
    "pre_logits": {"pre_logits": 20},
    "post_norm": {"post_norm": True},
    "layer_scale": {"layer_scale": 0.1},
    "qk_norm": {"qk_norm": True},
    "swiglu": {"activation": "swiglu"},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "conv stem": {"stem": "conv", "stem_layers": (16, 32), "patch_size": 2},
    "hybrid": {"stem": "resnet", "stem_layers": (1, 1), "stem_width": 32, "patch_size": 1},
    "patch_norm": {"patch_norm": True, "qkv_bias": False, "out_bias": False},
    "non-square": {"image_size": (32, 64)},
    "4 channels": {"in_channels": 4},
}


def make_vit(seed: int = 0, **changes: object) -> ViT:
    """Builds a small model with random weights everywhere, also in the head, which would start at zero."""
    torch.manual_seed(seed)
    model = build_model(BASE.replace(**changes)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def random_images(model: ViT, batch: int = 2) -> Tensor:
    """Random images of the model's input size."""
    torch.manual_seed(1)
    return torch.randn(batch, model.config.in_channels, *model.config.image_size)
