"""facebookresearch/dinov2's .pth backbones, with and without registers, GELU or SwiGLU; they have no head."""

from typing import Any, ClassVar

from ...config import ViTConfig
from ..family import Family, Fields, Metadata, Source, Tensors, assumed_heads, infer_num_heads
from ..mapping import Rule, TensorMap
from .facebook_deit import NO_DEIT
from .timm import TENSOR_MAP as TIMM_MAP
from .timm_fields import infer_fields, infer_positions

TENSOR_MAP: TensorMap = {
    **{ours: rule for ours, rule in TIMM_MAP.items() if not ours.startswith((*NO_DEIT, "head", "distillation"))},
    "registers": Rule("register_tokens"),
}
SWIGLU = {"blocks.{}.mlp.fc1": Rule("blocks.{}.mlp.w12"), "blocks.{}.mlp.fc2": Rule("blocks.{}.mlp.w3")}


class DINOv2(Family):
    """facebookresearch/dinov2 (Oquab et al. 2023, arXiv:2304.07193)."""

    name = "dinov2"
    suffix = ".pth"
    supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "class_token": (True,),
        "pooling": ("class",),
        "pos_embed": ("learned",),
        "num_classes": (0,),
    }
    defaults: ClassVar[Fields] = {"layer_scale": 1.0, "num_classes": 0}
    preprocess: ClassVar[Fields] = {"crop": 0.875, "statistics": "imagenet"}
    passthrough: ClassVar[dict[str, str]] = {"mask_token": "mask_token"}

    def matches(self, source: Source) -> bool:
        names = source.tensors
        own = "mask_token" in names or "register_tokens" in names or "blocks.0.mlp.w12.weight" in names
        return "pos_embed" in names and "patch_embed.proj.weight" in names and own

    def read_metadata(self, source: Source, tensors: Tensors, overrides: Fields) -> Metadata:
        fields = {**self.defaults, **infer_fields(tensors)}
        fields["num_heads"] = infer_num_heads(fields["embed_dim"], overrides, source.path.name)
        # The models with registers use antialiased interpolation, as timm does.
        fields["pos_embed_resample"] = "timm" if fields["num_registers"] else "dinov2"
        counted = {**fields, "num_registers": 0}  # registers have no position embedding
        fields |= infer_positions(tensors, counted, overrides, no_embed_class=False)
        return Metadata(fields, assumed=assumed_heads(fields["embed_dim"]))

    def denormalize(self, tensors: Tensors, config: ViTConfig, quirks: Fields) -> Tensors:
        """Add the mask token that DINOv2's code requires; it is used in pretraining only, and initialized to zero."""
        return {"mask_token": tensors["cls_token"].new_zeros(1, tensors["cls_token"].shape[-1]), **tensors}

    def tensor_map(self, config: ViTConfig) -> TensorMap:
        return {**TENSOR_MAP, **SWIGLU} if config.activation == "swiglu" else TENSOR_MAP
