"""facebookresearch/dinov2's .pth backbones, with and without registers, GELU or SwiGLU; they have no head."""

from typing import Any, ClassVar

from ...config import ViTConfig
from ..family import Described, Family, Fields, Source, Tensors, guess_heads
from ..mapping import Rule, Table
from .facebook_deit import NO_DEIT
from .timm import TABLE, positions_of, tensor_fields

OWN: Table = {
    **{ours: rule for ours, rule in TABLE.items() if not ours.startswith((*NO_DEIT, "head", "distillation"))},
    "registers": Rule("register_tokens"),
}
SWIGLU = {"blocks.{}.mlp.fc1": Rule("blocks.{}.mlp.w12"), "blocks.{}.mlp.fc2": Rule("blocks.{}.mlp.w3")}


class DINOv2(Family):
    name = "dinov2"
    suffix = ".pth"
    needs: ClassVar[dict[str, tuple[Any, ...]]] = {
        "class_token": (True,),
        "pooling": ("class",),
        "pos_embed": ("learned",),
        "num_classes": (0,),
    }
    defaults: ClassVar[Fields] = {"layer_scale": 1.0, "num_classes": 0}
    preprocess: ClassVar[Fields] = {"crop": 0.875, "statistics": "imagenet"}
    unused: ClassVar[dict[str, str]] = {"mask_token": "mask_token"}

    def recognises(self, source: Source) -> bool:
        names = source.tensors
        own = "mask_token" in names or "register_tokens" in names or "blocks.0.mlp.w12.weight" in names
        return "pos_embed" in names and "patch_embed.proj.weight" in names and own

    def describe(self, source: Source, tensors: Tensors, given: Fields) -> Described:
        fields = {**self.defaults, **tensor_fields(tensors)}
        fields["num_heads"] = guess_heads(fields["embed_dim"], given, source.path.name)
        # The register models were made with another, antialiased rule: the same as timm's.
        fields["pos_embed_resample"] = "timm" if fields["num_registers"] else "dinov2"
        counted = {**fields, "num_registers": 0}  # registers have no position
        return Described(fields | positions_of(tensors, counted, given, no_embed_class=False))

    def restore(self, tensors: Tensors, quirks: Fields) -> Tensors:
        """DINOv2's own code wants a mask token, used in pre-training only: zeros, as it begins, where there is none."""
        return {"mask_token": tensors["cls_token"].new_zeros(1, tensors["cls_token"].shape[-1]), **tensors}

    def table(self, config: ViTConfig) -> Table:
        return {**OWN, **SWIGLU} if config.activation == "swiglu" else OWN
