"""facebookresearch/deit's .pth files: DeiT, distilled DeiT (two heads) and DeiT III (LayerScale)."""

from typing import Any, ClassVar

from ...config import ViTConfig
from ..family import Family, Fields, Metadata, Source, Tensors, assumed_heads, infer_num_heads
from ..mapping import Rule, TensorMap
from .timm import TENSOR_MAP as TIMM_MAP
from .timm import find_architecture
from .timm_fields import infer_fields, infer_positions

NO_DEIT = ("registers", "pool.", "stem.", "blocks.{}.attention.q_norm", "blocks.{}.attention.k_norm")
TENSOR_MAP: TensorMap = {
    **{ours: rule for ours, rule in TIMM_MAP.items() if not ours.startswith(NO_DEIT)},
    "blocks.{}.add1.gamma": Rule("blocks.{}.gamma_1"),
    "blocks.{}.add2.gamma": Rule("blocks.{}.gamma_2"),
}


class DeiT(Family):
    """facebookresearch/deit: DeiT (arXiv:2012.12877) and DeiT III (arXiv:2204.07118)."""

    name = "deit"
    suffix = ".pth"
    supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "class_token": (True,),
        "pooling": ("class",),
        "pos_embed": ("learned",),
        "activation": ("gelu", "gelu_tanh"),
    }
    defaults: ClassVar[Fields] = {"pos_embed_resample": "transformers"}  # bicubic, without antialiasing
    preprocess: ClassVar[Fields] = {"crop": 0.875, "statistics": "imagenet"}

    def matches(self, source: Source) -> bool:
        """Match timm's names inside {"model": ...} or with the LayerScale names of DeiT III."""
        names = source.tensors
        plain = "pos_embed" in names and "patch_embed.proj.weight" in names and "mask_token" not in names
        own = source.wrapped or ("blocks.0.gamma_1" in names and source.path.suffix == ".pth")
        architecture = find_architecture(source)[0]
        is_deit = architecture is None or (architecture.startswith("deit") and not source.config)
        return plain and own and "head.weight" in names and is_deit

    def normalize(self, source: Source) -> tuple[Tensors, Fields]:
        return source.tensors, {} if source.wrapped else {"bare": True}

    def read_metadata(self, source: Source, tensors: Tensors, overrides: Fields) -> Metadata:
        fields = {**self.defaults, **infer_fields(tensors)}
        fields["num_heads"] = infer_num_heads(fields["embed_dim"], overrides, source.path.name)
        without_class = fields.get("layer_scale") is not None  # DeiT III
        fields |= infer_positions(tensors, fields, overrides, without_class)
        return Metadata(fields, assumed=assumed_heads(fields["embed_dim"]))

    def wraps(self, quirks: Fields) -> bool:
        return not quirks.get("bare")

    def num_positioned_tokens(self, config: ViTConfig) -> int:
        """The class token has a position embedding in DeiT, but not in DeiT III."""
        return 0 if config.layer_scale is not None else config.class_token + config.distillation

    def tensor_map(self, config: ViTConfig) -> TensorMap:
        return TENSOR_MAP
