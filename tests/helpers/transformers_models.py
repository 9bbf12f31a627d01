"""Tiny random models of transformers' own classes, the oracle of what a folder of theirs computes."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}
MLP = {"intermediate_size": 96}
CLIP: dict[str, Any] = {**MLP, "projection_dim": 20}
TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40}
TEXT |= {"max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
BEIT = {**MLP, "layer_scale_init_value": 0.1}

# kind: config class, model class, changes of SMALL
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dinov3": ("DINOv3ViTConfig", "DINOv3ViTModel", {**MLP, "num_register_tokens": 4}),
    "dinov3 gated": ("DINOv3ViTConfig", "DINOv3ViTModel", {**MLP, "use_gated_mlp": True, "hidden_act": "silu"}),
    "dinov3 key bias, other theta": (
        "DINOv3ViTConfig",
        "DINOv3ViTModel",
        {**MLP, "key_bias": True, "rope_theta": 50.0},
    ),
    "clip": ("CLIPVisionConfig", "CLIPVisionModel", CLIP),
    "clip with projection, GELU": ("CLIPVisionConfig", "CLIPVisionModelWithProjection", {**CLIP, "hidden_act": "gelu"}),
    "clip classifier": ("CLIPConfig", "CLIPForImageClassification", CLIP),
    "siglip": ("SiglipVisionConfig", "SiglipVisionModel", MLP),
    "siglip2 (NaFlex)": ("Siglip2VisionConfig", "Siglip2VisionModel", {**MLP, "num_patches": 16}),
    "siglip classifier": ("SiglipConfig", "SiglipForImageClassification", MLP),
    "beit": ("BeitConfig", "BeitForImageClassification", {**BEIT, "use_relative_position_bias": True}),
    "beit, shared table, class token": (
        "BeitConfig",
        "BeitForImageClassification",
        {
            **BEIT,
            "use_shared_relative_position_bias": True,
            "use_absolute_position_embeddings": True,
            "use_mean_pooling": False,
        },
    ),
    "beit without head": ("BeitConfig", "BeitModel", {**BEIT, "use_relative_position_bias": True}),
    "data2vec": (
        "Data2VecVisionConfig",
        "Data2VecVisionForImageClassification",
        {**BEIT, "use_relative_position_bias": True, "out_indices": [0]},
    ),
    "mae": ("ViTMAEConfig", "ViTMAEModel", {**MLP, "mask_ratio": 0.0}),
    "ijepa": ("IJepaConfig", "IJepaForImageClassification", MLP),
    "msn": ("ViTMSNConfig", "ViTMSNForImageClassification", MLP),
    "msn without head": ("ViTMSNConfig", "ViTMSNModel", MLP),
    "aimv2": ("Aimv2VisionConfig", "Aimv2VisionModel", {**MLP, "use_head": True}),
    "aimv2 with biases": ("Aimv2VisionConfig", "Aimv2VisionModel", {**MLP, "qkv_bias": True, "mlp_bias": True}),
    "aimv2 native": ("Aimv2VisionConfig", "Aimv2VisionModel", {**MLP, "is_native": True, "use_head": False}),
}


def random_model(kind: str, families: dict[str, tuple[str, str, dict[str, Any]]] = FAMILIES) -> nn.Module:
    """Build their model with weights large enough to reveal a wrong epsilon or GELU."""
    config_class, model_class, changes = families[kind]
    torch.manual_seed(0)
    if config_class in ("CLIPConfig", "SiglipConfig"):
        towers = {"vision_config": {**SMALL, **changes}, "text_config": TEXT}
        config = getattr(transformers, config_class)(**towers, num_labels=7)
    else:
        config = getattr(transformers, config_class)(**{**SMALL, **changes}, num_labels=7)
    model = getattr(transformers, model_class)(config).eval()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=0.03 if "embedding" in name else 0.3)
    return model


@torch.no_grad()
def their_output(model: nn.Module, images: Tensor) -> Tensor:
    """Return logits, the projected or pooled vector, or what users pool themselves."""
    if "MAE" in type(model).__name__:  # which shuffles the patches, by this noise
        noise = torch.arange(16.0).expand(len(images), -1)
        return model(images, noise=noise).last_hidden_state[:, 0]
    output = model(**pack(images)) if "Siglip2" in type(model).__name__ else model(pixel_values=images)
    for name in ("logits", "image_embeds", "pooler_output"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    tokens = output.last_hidden_state
    return tokens.mean(dim=1) if "Aimv2" in type(model).__name__ else tokens[:, 0]


def pack(images: Tensor) -> dict[str, Tensor]:
    """Cut images into 4x4 patches with channels last, as SigLIP 2 takes them."""
    patches = images.unflatten(3, (4, 8)).unflatten(2, (4, 8)).permute(0, 2, 4, 3, 5, 1).reshape(len(images), 16, -1)
    mask, shapes = torch.ones(len(images), 16, dtype=torch.int64), torch.full((len(images), 2), 4)
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}
