"""facebookresearch/mae's .pth files: the encoder of masked pre-training, and models that were fine-tuned."""

from typing import Any, ClassVar

from ...config import ViTConfig
from ...errors import Note
from ..family import Family, Fields, Metadata, Source, Tensors, assumed_heads, infer_num_heads, note_if
from ..mapping import Rule, TensorMap
from .facebook_deit import NO_DEIT
from .timm import TENSOR_MAP as TIMM_MAP
from .timm import find_architecture
from .timm_fields import infer_fields, infer_positions

TENSOR_MAP: TensorMap = {ours: rule for ours, rule in TIMM_MAP.items() if not ours.startswith(NO_DEIT)}
AVERAGE = {"norm": Rule("fc_norm")}
DECODER = ("decoder_", "mask_token")


class MAE(Family):
    """facebookresearch/mae (He et al. 2021, arXiv:2111.06377)."""

    name = "mae"
    suffix = ".pth"
    supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "class_token": (True,),
        "pooling": ("class", "average"),
        "pos_embed": ("learned",),
        "distillation": (False,),
        "layer_scale": (None,),
        "norm_pre": (False,),
        "activation": ("gelu", "gelu_tanh"),
    }
    defaults: ClassVar[Fields] = {"pos_embed_resample": "transformers"}  # bicubic, without antialiasing
    preprocess: ClassVar[Fields] = {"crop": 0.875, "statistics": "imagenet"}

    def matches(self, source: Source) -> bool:
        """Match timm's names inside {"model": ...} that have no head, a decoder, or a norm after pooling."""
        names = source.tensors
        plain = source.wrapped and {"pos_embed", "cls_token", "patch_embed.proj.weight"} <= set(names)
        other = {"dist_token", "register_tokens", "blocks.0.gamma_1", "blocks.0.ls1.gamma"} & set(names)
        own = "head.weight" not in names or "decoder_embed.weight" in names or "fc_norm.weight" in names
        return plain and own and not other and find_architecture(source)[0] is None

    def normalize(self, source: Source) -> tuple[Tensors, Fields]:
        return {n: t for n, t in source.tensors.items() if not n.startswith(DECODER)}, {}

    def read_metadata(self, source: Source, tensors: Tensors, overrides: Fields) -> Metadata:
        fields = {**self.defaults, **infer_fields(tensors)}
        fields["num_heads"] = infer_num_heads(fields["embed_dim"], overrides, source.path.name)
        fields |= infer_positions(tensors, fields, overrides, no_embed_class=False)
        text = "the decoder of masked pre-training is not read."
        return Metadata(
            fields,
            notes=note_if(source, DECODER[:1], Note(text, "decoder_skipped")),
            assumed=assumed_heads(fields["embed_dim"]),
        )

    def unsupported(self, config: ViTConfig) -> list[str]:
        problems = super().unsupported(config)
        if config.norm_after_pool != (config.pooling == "average"):
            problems.append(f"norm_after_pool={config.norm_after_pool} and pooling={config.pooling!r}")
        if config.pooling == "class" and config.num_classes:
            problems.append(f"num_classes={config.num_classes} and pooling='class'; write the deit format")
        return problems

    def wraps(self, quirks: Fields) -> bool:
        return True

    def tensor_map(self, config: ViTConfig) -> TensorMap:
        return {**TENSOR_MAP, **AVERAGE} if config.norm_after_pool else TENSOR_MAP
