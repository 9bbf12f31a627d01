"""A small model of every modern ViT family, with the config fields that its published models have.

Headless models are `config.replace(num_classes=0)`. No code may depend on the names: they are for the ids of tests.
"""

import torch

from patchword.config import ViTConfig
from patchword.models import Model, build_model
from patchword.models.layers import NoKeyBiasLinear

BASE = ViTConfig(image_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, mlp_dim=64, num_classes=5)

DINOV3 = BASE.replace(
    num_registers=4, pos_embed="rotary", rope="dinov3", key_bias=False, layer_scale=0.5, norm_eps=1e-5
)
SIGLIP = BASE.replace(class_token=False, pooling="attention", activation="gelu_tanh")
CLIP = BASE.replace(
    norm_pre=True, patch_bias=False, activation="quick_gelu", norm_after_pool=True, projection_dim=24, norm_eps=1e-5
)
# The reference grid of EVA-02 and PE is that of pre-training; these models were resized, as most published ones were.
EVA02 = BASE.replace(
    pos_embed="learned+rotary", rope="eva02", rope_reference=2, key_bias=False, activation="swiglu",
    pooling="average", norm_after_pool=True,
)  # fmt: skip
PE = BASE.replace(
    pos_embed="learned+rotary", rope="pe", rope_reference=3, norm_pre=True, patch_bias=False, norm_eps=1e-5,
    pooling="attention", pool_prefix=True, pool_heads=8, pool_mlp_dim=40,
)  # fmt: skip
PE_SPATIAL = PE.replace(
    pooling="average", pool_prefix=False, pool_heads=None, pool_mlp_dim=None, final_norm=False, layer_scale=0.1
)
BEIT = BASE.replace(
    pos_embed="relative", relative_prefix=True, key_bias=False, layer_scale=0.1, pooling="average",
    norm_after_pool=True,
)  # fmt: skip
AIMV2 = BASE.replace(
    class_token=False, norm_layer="rms_norm", norm_embed=True, norm_eps=1e-5, activation="swiglu", pooling="query",
    qkv_bias=False, out_bias=False, mlp_bias=False,
)  # fmt: skip

FAMILY_CONFIGS = {
    "dinov3": DINOV3,
    "dinov3 swiglu": DINOV3.replace(activation="swiglu"),
    "dinov3 stored periods": DINOV3.replace(rope_periods=(1.0, 3.15625, 10.0, 31.625), pooling="average"),
    "siglip": SIGLIP,
    "siglip2 naflex": SIGLIP.replace(pos_embed_resample="siglip2"),
    "clip": CLIP,
    "eva02": EVA02,
    "eva02 sub-LN": EVA02.replace(attention_norm=True, mlp_norm=True, pooling="class", norm_after_pool=False),
    "eva giant": BASE.replace(key_bias=False, pooling="average", norm_after_pool=True),
    "pe core": PE,
    "pe spatial": PE_SPATIAL,
    "pe lang": PE_SPATIAL.replace(class_token=False),
    "rope axial": BASE.replace(pos_embed="rotary", rope="axial", layer_scale=0.1),
    "rope mixed": BASE.replace(pos_embed="rotary", rope="mixed", layer_scale=0.1),
    "rope mixed, learned": BASE.replace(pos_embed="learned+rotary", rope="mixed", layer_scale=0.1),
    "beit": BEIT,
    "beit, absolute": BEIT.replace(pos_embed="learned+relative", pooling="class", norm_after_pool=False),
    "mae": BASE.replace(pooling="average", norm_after_pool=True),
    "ijepa": BASE.replace(class_token=False, pooling="average", norm_eps=1e-12),
    "rpn": BASE.replace(class_token=False, res_post_norm=True, qkv_bias=False, pooling="average", norm_after_pool=True),
    "aimv2": AIMV2,
    "aimv2 native": AIMV2.replace(pos_embed="sincos_mae", pooling="average"),
}


def family_model(config: ViTConfig, seed: int = 0) -> Model:
    """Builds a model in evaluation mode with random weights everywhere, also where a new model has zeros."""
    torch.manual_seed(seed)
    model = build_model(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5 if name.startswith("head") else 0.1)
        for module in model.modules():
            if isinstance(module, NoKeyBiasLinear):
                module.clear_key_bias()
    return model
