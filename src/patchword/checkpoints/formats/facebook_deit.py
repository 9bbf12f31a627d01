"""facebookresearch/deit's .pth files: DeiT, distilled DeiT (two heads) and DeiT III (LayerScale)."""

from typing import Any, ClassVar

from ...config import ViTConfig
from ..family import Described, Family, Fields, Source, Tensors, guess_heads
from ..mapping import Rule, Table
from .timm import TABLE, positions_of, tensor_fields

NO_DEIT = ("registers", "pool.", "stem.", "blocks.{}.attention.q_norm", "blocks.{}.attention.k_norm")
OWN: Table = {
    **{ours: rule for ours, rule in TABLE.items() if not ours.startswith(NO_DEIT)},
    "blocks.{}.add1.gamma": Rule("blocks.{}.gamma_1"),
    "blocks.{}.add2.gamma": Rule("blocks.{}.gamma_2"),
}


class DeiT(Family):
    name = "deit"
    suffix = ".pth"
    needs: ClassVar[dict[str, tuple[Any, ...]]] = {
        "class_token": (True,),
        "pooling": ("class",),
        "pos_embed": ("learned",),
        "activation": ("gelu", "gelu_tanh"),
    }
    defaults: ClassVar[Fields] = {"pos_embed_resample": "transformers"}  # plain bicubic, in both
    preprocess: ClassVar[Fields] = {"crop": 0.875, "statistics": "imagenet"}

    def recognises(self, source: Source) -> bool:
        """Timm's names, but inside {"model": ...} or with DeiT III's own LayerScale."""
        names = source.tensors
        plain = "pos_embed" in names and "patch_embed.proj.weight" in names and "mask_token" not in names
        return plain and (source.wrapped or "blocks.0.gamma_1" in names)

    def normalize(self, source: Source) -> tuple[Tensors, Fields]:
        return source.tensors, {} if source.wrapped else {"bare": True}

    def describe(self, source: Source, tensors: Tensors, given: Fields) -> Described:
        fields = {**self.defaults, **tensor_fields(tensors)}
        fields["num_heads"] = guess_heads(fields["embed_dim"], given, source.path.name)
        without_class = fields.get("layer_scale") is not None  # DeiT III
        return Described(fields | positions_of(tensors, fields, given, without_class))

    def positioned(self, config: ViTConfig) -> int:
        """DeiT III gives the class token no position, DeiT does."""
        return 0 if config.layer_scale is not None else config.class_token + config.distillation

    def table(self, config: ViTConfig) -> Table:
        return OWN
