"""facebookresearch/dinov3's .pth backbones of ViTs: rotary positions, four storage tokens, no head."""

from typing import Any, ClassVar

import torch

from ...config import ViTConfig
from ...errors import CheckpointError
from ...models.rope import CONVENTIONS
from ..family import Family, Fields, Metadata, Source, Tensors, get_shape
from ..mapping import Rule, TensorMap
from .timm import TENSOR_MAP as TIMM_MAP
from .timm_fields import infer_fields

TENSOR_MAP: TensorMap = {**TIMM_MAP, "registers": Rule("storage_tokens")}
GATED = {"blocks.{}.mlp.fc1": Rule("blocks.{}.mlp", (".w1", ".w2")), "blocks.{}.mlp.fc2": Rule("blocks.{}.mlp.w3")}
PERIODS, MASK = "rope_embed.periods", ".attn.qkv.bias_mask"
MASKED = "masked_bias."  # the bias of keys, which the mask hides


class DINOv3(Family):
    """facebookresearch/dinov3 (Simeoni et al. 2025, arXiv:2508.10104)."""

    name = "dinov3"
    suffix = ".pth"
    supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "pos_embed": ("rotary",),
        "rope": ("dinov3",),
        "class_token": (True,),
        "pooling": ("class",),
        "num_classes": (0,),
        "norm_after_pool": (False,),
    }
    defaults: ClassVar[Fields] = {"pos_embed": "rotary", "rope": "dinov3", "layer_scale": 1.0, "norm_eps": 1e-5}
    preprocess: ClassVar[Fields] = {"resize": "squash", "statistics": "imagenet"}

    def matches(self, source: Source) -> bool:
        return PERIODS in source.tensors and "patch_embed.proj.weight" in source.tensors

    def split_extras(self, tensors: Tensors) -> tuple[Tensors, Tensors]:
        """Separate the mask token, the rotary periods and the masked bias of the keys."""
        tensors = dict(tensors)
        extras = {n: tensors.pop(n) for n in ("mask_token", PERIODS) if n in tensors}
        for name in [n for n in tensors if n.endswith(MASK)]:
            mask, bias_name = tensors.pop(name), name.removesuffix("_mask")
            bias = tensors.get(bias_name)
            if bias is None or bias.shape != mask.shape or not hides_keys(mask):
                raise CheckpointError(f"{name} does not mask the bias of the keys, and nothing else.")
            queries, keys, values = bias.chunk(3)
            extras[MASKED + bias_name] = keys
            tensors[bias_name] = torch.cat([queries, torch.zeros_like(keys), values])
        return tensors, extras

    def join_extras(self, tensors: Tensors, extras: Tensors, config: ViTConfig) -> Tensors:
        """The inverse of `split_extras`; for a model of another family, with a mask token of zeros."""
        token = tensors["cls_token"]
        mask_token = extras.get("mask_token", token.new_zeros(token.shape)).reshape(1, -1)  # in transformers (1, 1, D)
        result = {**tensors, "mask_token": mask_token}
        result[PERIODS] = extras.get(PERIODS, rope_periods(config))
        for name in [n for n in tensors if n.endswith(".attn.qkv.bias") and not config.key_bias]:
            queries, keys, values = tensors[name].chunk(3)
            result[name] = torch.cat([queries, extras.get(MASKED + name, keys), values])
            result[name + "_mask"] = torch.ones_like(result[name]).index_fill(0, key_indices(result[name]), 0)
        return result

    def read_metadata(self, source: Source, tensors: Tensors, overrides: Fields) -> Metadata:
        gated = "blocks.0.mlp.w1.weight" in tensors
        renamed = {n.replace(".mlp.w1.", ".mlp.fc1.").replace(".mlp.w3.", ".mlp.fc2."): t for n, t in tensors.items()}
        fields = {**infer_fields(renamed), **self.defaults, "num_classes": 0, "pooling": "class"}
        fields["activation"] = "swiglu" if gated else "gelu"
        fields["key_bias"] = not any(n.endswith(MASK) for n in source.tensors)
        head_dim = 4 * get_shape(source.tensors, PERIODS, 1)[0]  # a period for each pair of row or column
        fields["num_heads"] = fields["embed_dim"] // head_dim
        fields["image_size"] = overrides.get("image_size", 224)
        stored, computed = source.tensors[PERIODS].float(), rope_periods(ViTConfig.from_json(fields))
        if stored.shape != computed.shape:
            raise CheckpointError(f"{PERIODS} has {len(stored)} periods, which do not fit width {fields['embed_dim']}.")
        if not torch.allclose(stored, computed, rtol=1e-6, atol=0):
            fields["rope_periods"] = tuple(stored.tolist())
        return Metadata(fields, assumed={"image_size": "rotary positions fit any size"}, architecture="dinov3")

    def tensor_map(self, config: ViTConfig) -> TensorMap:
        return {**TENSOR_MAP, **GATED} if config.activation == "swiglu" else TENSOR_MAP


def key_indices(bias: torch.Tensor) -> torch.Tensor:
    """Return the indices of keys in the bias of queries, keys and values."""
    return torch.arange(len(bias) // 3, 2 * len(bias) // 3)


def hides_keys(mask: torch.Tensor) -> bool:
    """Whether a mask is zero for the keys, and one for queries and values."""
    return mask.ndim == 1 and torch.equal(mask, torch.ones_like(mask).index_fill(0, key_indices(mask), 0))


def rope_periods(config: ViTConfig) -> torch.Tensor:
    """Return the rotary periods of a config, by default computed in float32, as DINOv3 does."""
    if config.rope_periods:
        return torch.tensor(config.rope_periods)
    quarter = config.attention_dim // 4
    return (config.rope_base or CONVENTIONS["dinov3"].base) ** (2 * torch.arange(quarter).float() / (2 * quarter))
