"""A small ViT with every option of the config, one at a time."""

import torch
from torch import Tensor, nn

from patchword.config import ViTConfig
from patchword.models import ViT, build_model
from patchword.models.layers import NoKeyBiasLinear

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
    "conv stem": {"stem": "conv", "stem_layers": (16, 32), "stem_convs": 2, "patch_size": 2},
    "hybrid": {"stem": "resnet", "stem_layers": (1, 1), "stem_width": 32, "patch_size": 1},
    "patch_norm": {"patch_norm": True, "qkv_bias": False, "out_bias": False},
    "non-square": {"image_size": (32, 64)},
    "4 channels": {"in_channels": 4},
    "sincos_mae": {"pos_embed": "sincos_mae"},
    "learned, relative prefix": {"pos_embed": "learned+relative", "relative_prefix": True, "pooling": "average"},
    "rope base": {"pos_embed": "rotary", "rope_base": 30.0},
    "rope eva02": {"pos_embed": "learned+rotary", "rope": "eva02", "rope_reference": (3, 5)},
    "rope pe": {"pos_embed": "learned+rotary", "rope": "pe"},
    "rope axial": {"pos_embed": "rotary", "rope": "axial"},
    "rope mixed": {"pos_embed": "rotary", "rope": "mixed"},
    "rope dinov3": {"pos_embed": "rotary", "rope": "dinov3", "rope_periods": (1.0, 3.0, 10.0, 30.0)},
    "norm_pre": {"norm_pre": True, "patch_bias": False},
    "norm_embed": {"norm_embed": True},
    "res_post_norm": {"res_post_norm": True},
    "no final norm": {"final_norm": False},
    "rms_norm": {"norm_layer": "rms_norm", "qk_norm": True},
    "sub-LN": {"attention_norm": True, "mlp_norm": True},
    "sub-LN, swiglu": {"activation": "swiglu", "mlp_norm": True},
    "key_bias": {"key_bias": False, "pos_embed": "rotary"},  # without RoPE, a bias of the keys has no effect
    "mlp_bias": {"mlp_bias": False},
    "quick_gelu": {"activation": "quick_gelu"},
    "query": {"pooling": "query", "class_token": False},
    "pool options": {"pooling": "attention", "pool_prefix": True, "pool_heads": 4, "pool_mlp_dim": 40},
    "query, pool options": {"pooling": "query", "pool_prefix": True, "pool_heads": 4},
    "projection": {"projection_dim": 20, "norm_after_pool": True, "norm_eps": 1e-5},
    "siglip2": {"pos_embed_resample": "siglip2"},
}


def make_vit(seed: int = 0, **changes: object) -> ViT:
    """Builds a small model with random weights everywhere, also in the head, which would start at zero."""
    torch.manual_seed(seed)
    model = build_model(BASE.replace(**changes)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    for module in model.modules():
        if isinstance(module, NoKeyBiasLinear):
            module.clear_key_bias()
    return model


def random_images(model: ViT, batch: int = 2) -> Tensor:
    """Random images of the model's input size."""
    torch.manual_seed(1)
    return torch.randn(batch, model.config.in_channels, *model.config.image_size)
