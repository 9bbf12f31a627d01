"""open_clip's CLIP models: image towers of its own class, or of timm, beside a text tower that is not read."""

from dataclasses import replace
from typing import ClassVar

from ...config import ViTConfig
from ...errors import CheckpointError, Note
from ..family import (
    Family,
    Fields,
    Metadata,
    Source,
    Tensors,
    count_blocks,
    get_shape,
    infer_image_size,
    note_if,
    require_fields,
)
from ..mapping import Patch, Rule, Squeezed, TensorMap, Transposed
from .timm import PROJECTION, Timm

VISUAL, TRUNK = "visual.", "visual.trunk."
HEAD = "visual.head.proj.weight"  # of a tower of timm
BLOCK = "transformer.resblocks.{}"
TENSOR_MAP: TensorMap = {
    "class_token": Squeezed("class_embedding", lead=2),
    "positions.table": Squeezed("positional_embedding"),
    "patch_embed.proj": Patch("conv1"),
    "norm_pre": Rule("ln_pre"),
    "blocks.{}.norm1": Rule(BLOCK + ".ln_1"),
    "blocks.{}.attention.qkv.weight": Rule(BLOCK + ".attn.in_proj_weight"),
    "blocks.{}.attention.qkv.bias": Rule(BLOCK + ".attn.in_proj_bias"),
    "blocks.{}.attention.out": Rule(BLOCK + ".attn.out_proj"),
    "blocks.{}.add1.gamma": Rule(BLOCK + ".ls_1.gamma"),
    "blocks.{}.norm2": Rule(BLOCK + ".ln_2"),
    "blocks.{}.mlp.fc1": Rule(BLOCK + ".mlp.c_fc"),
    "blocks.{}.mlp.fc2": Rule(BLOCK + ".mlp.c_proj"),
    "blocks.{}.add2.gamma": Rule(BLOCK + ".ls_2.gamma"),
    "norm": Rule("ln_post"),
    "pre_logits.weight": Transposed("proj"),
}
UNREADABLE: tuple[str, ...] = ("attentional_pool", "final_ln_after_pool", "no_ln_pre", "block_type", "qk_norm")
UNREADABLE += ("scaled_cosine_attn", "scale_heads", "scale_attn_inner", "scale_attn", "scale_fc")
UNREADABLE += ("act_kwargs", "norm_kwargs")
TEXT_TOWER = ("text.", "transformer.", "text_projection", "token_embedding.")
TEXT_NOTE = "only the image tower is read, not the text tower."


class OpenCLIP(Family):
    """mlfoundations/open_clip."""

    name = "open_clip"
    suffix = ".safetensors"
    writable = False  # its files need a text tower
    defaults: ClassVar[Fields] = {"pos_embed_resample": "timm", "norm_eps": 1e-5, "num_classes": 0}
    preprocess: ClassVar[Fields] = {"statistics": "clip"}

    def matches(self, source: Source) -> bool:
        return f"{VISUAL}conv1.weight" in source.tensors and f"{VISUAL}class_embedding" in source.tensors

    def normalize(self, source: Source) -> tuple[Tensors, Fields]:
        return {n.removeprefix(VISUAL): t for n, t in source.tensors.items() if n.startswith(VISUAL)}, {}

    def read_metadata(self, source: Source, tensors: Tensors, overrides: Fields) -> Metadata:
        stated, vision = model_config(source)
        fields = {**self.defaults, **infer_fields(tensors)}
        width = fields["embed_dim"]
        if stated:
            stated_fields = {"head_dim": vision.get("head_width", 64), "depth": vision.get("layers", 12)}
            cast = ViTConfig.cast_fields(stated_fields)
            fields |= {"num_heads": width // max(1, cast["head_dim"]), "depth": cast["depth"]}
            fields["activation"] = "quick_gelu" if stated.get("quick_gelu") else "gelu"
            size = ViTConfig.cast_fields({"image_size": vision["image_size"]}) if "image_size" in vision else {}
            overrides = {**overrides, **size}
        else:
            reason = f"There is no open_clip_config.json beside {source.path.name}: it states how the model computes."
            require_fields(overrides, ("num_heads", "activation"), f"{reason} Put it there.")
        count = get_shape(tensors, "positional_embedding", 2)[0]
        fields["image_size"] = infer_image_size(count - 1, fields["patch_size"], overrides)
        return Metadata(
            fields,
            preprocess=parse_preprocess(source),
            notes=note_if(source, TEXT_TOWER, Note(TEXT_NOTE, "text_tower_skipped")),
            architecture="open_clip",
            stated_size=vision.get("image_size"),
        )

    def tensor_map(self, config: ViTConfig) -> TensorMap:
        return TENSOR_MAP


class OpenCLIPTimm(Timm):
    """mlfoundations/open_clip, with an image tower of timm."""

    name = "open_clip"
    variant = "timm"
    suffix = ".safetensors"
    writable = False

    def matches(self, source: Source) -> bool:
        return any(n.startswith(TRUNK) for n in source.tensors)

    def normalize(self, source: Source) -> tuple[Tensors, Fields]:
        visual = [n for n in source.tensors if n.startswith(VISUAL) and not n.startswith(TRUNK)]
        if visual not in ([], [HEAD]):
            raise CheckpointError(f"The image tower has another head than a linear one: {', '.join(visual[:4])}.")
        tensors, _ = super().normalize(trunk(source))
        return {**tensors, **({PROJECTION: source.tensors[HEAD]} if visual else {})}, {}

    def read_metadata(self, source: Source, tensors: Tensors, overrides: Fields) -> Metadata:
        metadata = super().read_metadata(trunk(source), tensors, overrides)
        metadata.preprocess |= parse_preprocess(source)
        metadata.notes += note_if(source, TEXT_TOWER, Note(TEXT_NOTE, "text_tower_skipped"))
        return metadata


def trunk(source: Source) -> Source:
    """Return the image tower of timm as a checkpoint of timm."""
    tensors = {n.removeprefix(TRUNK): t for n, t in source.tensors.items() if n.startswith(TRUNK)}
    _, vision = model_config(source)
    config: Fields = {"architecture": vision["timm_model_name"]} if "timm_model_name" in vision else {}
    if config and vision.get("timm_pool"):
        config["global_pool"] = vision["timm_pool"]
    return replace(source, tensors=tensors, config=config)


def infer_fields(tensors: Tensors) -> Fields:
    """Infer the fields that the tensors of open_clip's own class show."""
    width, channels, ph, pw = get_shape(tensors, "conv1.weight", 4)
    fields: Fields = {"patch_size": (ph, pw), "in_channels": channels, "embed_dim": width}
    fields |= {"norm_pre": "ln_pre.weight" in tensors, "patch_bias": False}
    fields["depth"] = count_blocks(tensors, "transformer.resblocks.", ".")
    fields["mlp_dim"] = get_shape(tensors, BLOCK.format(0) + ".mlp.c_fc.weight", 2)[0]
    fields["layer_scale"] = 1.0 if BLOCK.format(0) + ".ls_1.gamma" in tensors else None
    fields["projection_dim"] = get_shape(tensors, "proj", 2)[1] if "proj" in tensors else None
    return fields


def model_config(source: Source) -> tuple[Fields, Fields]:
    """Return the model's config, and the part of it that is about the image tower; both may be empty."""
    stated = source.open_clip.get("model_cfg", {})
    vision = stated.get("vision_cfg", {}) if isinstance(stated, dict) else None
    if not isinstance(vision, dict):
        raise CheckpointError("open_clip_config.json has no vision_cfg.")
    unreadable = {name: vision[name] for name in UNREADABLE if vision.get(name)}
    unreadable |= {"pool_type": vision["pool_type"]} if vision.get("pool_type", "tok") != "tok" else {}
    kind = vision.get("pos_embed_type", "learnable")
    unreadable |= {"pos_embed_type": kind} if kind != "learnable" else {}
    if unreadable:
        values = ", ".join(f"{name}={value!r}" for name, value in unreadable.items())
        raise CheckpointError(f"open_clip_config.json has options that patchword does not read: {values}.")
    return stated, vision


def parse_preprocess(source: Source) -> Fields:
    """Convert preprocess_cfg to fields of Preprocess."""
    stated = source.open_clip.get("preprocess_cfg")
    if not isinstance(stated, dict):
        return {}
    fields = {name: stated[name] for name in ("mean", "std", "interpolation") if stated.get(name) is not None}
    return fields | {"crop": 1.0, "resize": "squash" if stated.get("resize_mode") == "squash" else "cover"}
