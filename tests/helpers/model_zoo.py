"""Small models of every kind, with random weights."""

import torch

from patchword.checkpoints import Checkpoint
from patchword.config import ResNetConfig, ViTConfig
from patchword.data.preprocess import Preprocess
from patchword.models import Model, build_model
from patchword.models.layers import NoKeyBiasLinear

BASE = ViTConfig(image_size=(32, 36), patch_size=(8, 4), embed_dim=24, depth=3, num_heads=3, mlp_dim=32, num_classes=5)
VITS = {
    "class": BASE,
    "average": BASE.replace(class_token=False, pooling="average", norm_after_pool=True),
    "both": BASE.replace(pooling="class+average"),
    "probe": BASE.replace(class_token=False, pooling="attention"),
    "probe and class token": BASE.replace(pooling="attention"),
    "registers": BASE.replace(num_registers=3),
    "distilled": BASE.replace(distillation=True),
    "gray": BASE.replace(in_channels=1),
    "relative": BASE.replace(pos_embed="relative", class_token=False, pooling="average"),
    "rotary": BASE.replace(pos_embed="rotary", embed_dim=24, head_dim=8),
    "no positions": BASE.replace(pos_embed="none"),
    "sin-cos, normed": BASE.replace(pos_embed="sincos", qk_norm=True, post_norm=True),
    "local": BASE.replace(attention_pattern="local", window_size=3),
    "swiglu, scaled": BASE.replace(activation="swiglu", layer_scale=0.1),
    "hybrid": BASE.replace(image_size=(32, 48), patch_size=(2, 2), stem="resnet", stem_layers=(1,), stem_width=32),
    "convolutions": BASE.replace(
        patch_size=(1, 1), image_size=(32, 48), stem="conv", stem_layers=(8, 16), stem_convs=2
    ),
    "relative prefix": BASE.replace(pos_embed="learned+relative", relative_prefix=True, key_bias=False),
    "rope, sub-LN": BASE.replace(
        pos_embed="learned+rotary",
        rope="eva02",
        rope_reference=(3, 5),
        key_bias=False,
        activation="swiglu",
        attention_norm=True,
        mlp_norm=True,
        pooling="average",
    ),
    "rope mixed": BASE.replace(pos_embed="rotary", rope="mixed", num_registers=2, final_norm=False),
    "probe of all tokens": BASE.replace(
        norm_pre=True, patch_bias=False, pooling="attention", pool_prefix=True, pool_heads=4, pool_mlp_dim=40
    ),
    "query, normed": BASE.replace(
        norm_layer="rms_norm", norm_embed=True, pooling="query", class_token=False, qkv_bias=False, mlp_bias=False
    ),
    "projection": BASE.replace(activation="quick_gelu", norm_after_pool=True, projection_dim=20),
    "res_post_norm": BASE.replace(res_post_norm=True, pos_embed="sincos_mae"),
}
RESNETS = {
    "ResNet": ResNetConfig(image_size=(32, 32), layers=(1, 1, 1), kind="cifar", num_classes=5),
    "BiT": ResNetConfig(image_size=(64, 64), layers=(1, 1, 1, 1), num_classes=5),
}


def random_model(config: ViTConfig | ResNetConfig, seed: int = 0) -> Model:
    """Builds a model with random weights, also in the head, which would start at zero."""
    torch.manual_seed(seed)
    model = build_model(config).eval()
    for name, parameter in model.named_parameters():
        if name.startswith("head") or parameter.ndim == 1:
            torch.nn.init.normal_(parameter, std=0.3)
    for module in model.modules():
        if isinstance(module, NoKeyBiasLinear):
            module.clear_key_bias()
    return model


def make_checkpoint(config: ViTConfig | ResNetConfig) -> Checkpoint:
    mean = (0.5,) * config.in_channels
    preprocess = Preprocess(size=config.image_size, mean=mean, std=mean)
    labels = (*tuple(f"class {i}, also <{i}>" for i in range(config.num_classes - 1)), r"$\\broken{ 猫猫")
    return Checkpoint(config, dict(random_model(config).state_dict()), preprocess, labels)
