"""timm's Vision Transformers: a folder with config.json, or a bare .safetensors or .pth state dict.

timm has four classes for them: VisionTransformer, Eva, Beit and NaFlexVit. `timm_names` unifies their names of tensors,
`timm_fields` reads what tensors show, and `timm_architectures` has what they do not show.
"""

import math
from typing import Any, ClassVar

from ...config import ViTConfig
from ...errors import CheckpointError, Note
from ..family import (
    Family,
    Fields,
    Metadata,
    Source,
    Tensors,
    get_shape,
    infer_num_heads,
    require_fields,
)
from ..mapping import OffsetTable, Patch, Rule, TensorMap, Transposed
from .timm_architectures import architecture_fields, name_in_path, size_in_name
from .timm_clip import check_quick_gelu, has_projection
from .timm_fields import BACKBONE, infer_fields, infer_positions
from .timm_json import POOLS, parse_model_args, parse_preprocess, timm_config
from .timm_names import FREQUENCIES, TABLE, restore, unify
from .transformers_beit import check_tables

STAGE = f"{BACKBONE}.stages.{{}}.blocks.{{}}"

TENSOR_MAP: TensorMap = {
    "class_token": Rule("cls_token"),
    "distillation_token": Rule("dist_token"),
    "registers": Rule("reg_token"),
    "positions.table": Rule("pos_embed"),
    "patch_embed.proj": Patch("patch_embed.proj"),
    "patch_embed.norm_out": Rule("patch_embed.norm"),
    "norm_pre": Rule("norm_pre"),
    "blocks.{}.norm1": Rule("blocks.{}.norm1"),
    "blocks.{}.attention.qkv": Rule("blocks.{}.attn.qkv"),
    "blocks.{}.attention.q_norm": Rule("blocks.{}.attn.q_norm"),
    "blocks.{}.attention.k_norm": Rule("blocks.{}.attn.k_norm"),
    "blocks.{}.attention.norm": Rule("blocks.{}.attn.norm"),
    "blocks.{}.attention.bias.relative": OffsetTable(f"blocks.{{}}.attn.{TABLE}.patches"),
    "blocks.{}.attention.bias.prefix": Transposed(f"blocks.{{}}.attn.{TABLE}.prefix"),
    "blocks.{}.attention.rotary.frequencies": Rule(f"blocks.{{}}.attn.{FREQUENCIES}"),
    "blocks.{}.attention.out": Rule("blocks.{}.attn.proj"),
    "blocks.{}.add1.gamma": Rule("blocks.{}.ls1.gamma"),
    "blocks.{}.norm2": Rule("blocks.{}.norm2"),
    "blocks.{}.mlp.fc1": Rule("blocks.{}.mlp.fc1"),
    "blocks.{}.mlp.norm": Rule("blocks.{}.mlp.norm"),
    "blocks.{}.mlp.fc2": Rule("blocks.{}.mlp.fc2"),
    "blocks.{}.add2.gamma": Rule("blocks.{}.ls2.gamma"),
    "norm": Rule("norm"),
    "pool.probe": Rule("attn_pool.latent"),
    **{f"pool.{part}": Rule(f"attn_pool.{part}") for part in ("q", "kv", "norm")},
    "pool.out": Rule("attn_pool.proj"),
    "pool.fc1": Rule("attn_pool.mlp.fc1"),
    "pool.fc2": Rule("attn_pool.mlp.fc2"),
    "pre_logits": Rule("projection"),
    "head": Rule("head"),
    "head_distilled": Rule("head_dist"),
    "stem.conv": Rule(f"{BACKBONE}.stem.conv"),
    "stem.norm": Rule(f"{BACKBONE}.stem.norm"),
    **{f"stem.stages.{{}}.{{}}.{kind}{i}": Rule(f"{STAGE}.{kind}{i}") for kind in ("conv", "norm") for i in (1, 2, 3)},
    "stem.stages.{}.{}.shortcut.conv": Rule(f"{STAGE}.downsample.conv"),
    "stem.stages.{}.{}.shortcut.norm": Rule(f"{STAGE}.downsample.norm"),
}
ROOT_ONLY = {"stem.conv": Rule(f"{BACKBONE}.conv"), "stem.norm": Rule(f"{BACKBONE}.norm")}

PROJECTION = "projection.weight"  # in timm, CLIP's projection is a head with a bias of zeros
ROPE_FIELDS = ("rope", "rope_base", "rope_reference")
POOL_FIELDS = ("pool_heads", "pool_prefix")
# What the tensors do not show, with the values of an ordinary model.
HIDDEN: Fields = {"activation": "gelu", "norm_eps": 1e-6, "res_post_norm": False}
NAMELESS = (
    "The file names no architecture, and its tensors do not show how it computes. Put timm's config.json beside it, or "
    "name it after its architecture, as in vit_base_patch16_siglip_224.webli.safetensors."
)
UNKNOWN = (
    "patchword does not know timm's architecture {}. If it computes as one that timm knows, such as "
    'vit_base_patch16_224, put that name in config.json: "architecture": "vit_base_patch16_224".'
)


class Timm(Family):
    """huggingface/pytorch-image-models: ViT, DeiT, DINOv2, DINOv3, CLIP, SigLIP, EVA-02, PE, BEiT, AIMv2, NaFlexViT."""

    name = "timm"
    supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "pos_embed": ("learned", "rotary", "learned+rotary", "relative", "learned+relative"),
        "pooling": tuple(POOLS.values()),
        "pre_logits": (None,),
    }
    defaults: ClassVar[Fields] = {"weight_standardization": "timm", "pos_embed_resample": "timm"}
    preprocess: ClassVar[Fields] = {"crop": 0.9}

    def matches(self, source: Source) -> bool:
        names = source.tensors
        embeds = "embeds.proj.weight" in names or any(n.startswith("patch_embed.") for n in names)
        return embeds and any(n.startswith("blocks.0.attn.") for n in names)

    def normalize(self, source: Source) -> tuple[Tensors, Fields]:
        tensors, spellings = unify(source.tensors)
        if has_projection(source, find_architecture(source)[0] or "")[0]:
            tensors = {PROJECTION if n == "head.weight" else n: t for n, t in tensors.items()}
            del tensors["head.bias"]
        quirks: Fields = {"spellings": spellings}
        if isinstance(source.config.get("model_args"), dict) and "architecture" in source.config:
            quirks |= {name: source.config[name] for name in ("architecture", "model_args")}
        return tensors, quirks

    def denormalize(self, tensors: Tensors, config: ViTConfig, quirks: Fields) -> Tensors:
        if PROJECTION in tensors:
            weight = tensors[PROJECTION]
            rest = {n: t for n, t in tensors.items() if n != PROJECTION}
            tensors = {**rest, "head.weight": weight, "head.bias": weight.new_zeros(len(weight))}
        return restore(tensors, quirks.get("spellings", choose_spellings(config)), config)

    def read_metadata(self, source: Source, tensors: Tensors, overrides: Fields) -> Metadata:
        arguments = source.config.get("model_args") or {}
        if not isinstance(arguments, dict):
            raise CheckpointError("config.json has model_args that are not an object.")
        inferred = {**infer_fields(tensors), "key_bias": has_key_bias(source.tensors)}
        stated = parse_model_args(source.config, arguments)
        architecture, tag, notes = find_architecture(source)
        if architecture:
            notes += check_quick_gelu(source, architecture, tag) + has_projection(source, architecture)[1]
        known = architecture_fields(architecture) if architecture else None
        by_name, preprocess = known or (guess_hidden(architecture, inferred, {**stated, **overrides}, source), {})
        assumed = {} if known else {name: "timm's default" for name in by_name if name not in overrides}
        fields = combine(inferred, by_name, stated)
        fields["projection_dim"] = get_shape(tensors, PROJECTION, 2)[0] if PROJECTION in tensors else None
        if "num_heads" not in fields:
            fields["num_heads"] = infer_num_heads(fields["embed_dim"], overrides, source.path.name)
            assumed = {**assumed, "num_heads": f"that of models of width {fields['embed_dim']}"}
        if inferred.get("pos_embed") == "relative":
            check_tables(source, TABLE, {**fields, **overrides})
        fields |= self.positions(source, tensors, fields, overrides, arguments)
        labels = source.config.get("label_names")
        return Metadata(
            {**self.defaults, **fields},
            preprocess={**preprocess, **parse_preprocess(source.config.get("pretrained_cfg"))},
            labels=tuple(map(str, labels)) if isinstance(labels, list) else None,
            notes=notes,
            assumed={name: why for name, why in assumed.items() if name in fields},
            architecture=architecture,
            stated_size=find_stated_size(source, arguments, architecture or "", fields),
        )

    def positions(
        self, source: Source, tensors: Tensors, fields: Fields, overrides: Fields, arguments: Fields
    ) -> Fields:
        """Infer the image size, and which positions are learned."""
        own_grid = source.tensors.get("embeds.pos_embed")
        if own_grid is not None and own_grid.ndim == 4:  # NaFlexVit: images may have another size than its positions
            grid, patch = own_grid.shape[1:3], fields["patch_size"]
            overrides = {**overrides, "image_size": (grid[0] * patch[0], grid[1] * patch[1])}
            return infer_positions(tensors, fields, overrides, no_embed_class=True)
        if "image_size" in fields:
            overrides = {**overrides, "image_size": fields["image_size"]}
        if "pos_embed" in tensors:
            found = infer_positions(tensors, fields, overrides, arguments.get("no_embed_class"))
            kind = fields.get("pos_embed", "learned")
            return {**found, "pos_embed": kind if kind == "learned" else f"learned+{kind}"}
        if "image_size" not in overrides:
            overrides = {**overrides, "image_size": infer_size_of_tables(tensors, fields)}
        return {"image_size": overrides["image_size"], "pos_embed_prefix": 0}

    def unsupported(self, config: ViTConfig) -> list[str]:
        problems = super().unsupported(config)
        if config.projection_dim and config.num_classes:
            problems.append(f"projection_dim={config.projection_dim} and a head")
        return problems

    def num_positioned_tokens(self, config: ViTConfig) -> int:
        """All prefix tokens have position embeddings, or none (no_embed_class)."""
        return config.num_prefix if config.num_positioned == config.num_prefix else 0

    def tensor_map(self, config: ViTConfig) -> TensorMap:
        tensor_map = {**TENSOR_MAP, **({} if config.stem_layers else ROOT_ONLY)}
        return {**tensor_map, "norm": Rule("fc_norm")} if config.norm_after_pool else tensor_map

    def sidecars(
        self, config: ViTConfig, labels: tuple[str, ...] | None, preprocess: Fields, quirks: Fields
    ) -> dict[str, Fields]:
        return {"config.json": timm_config(config, labels, preprocess, quirks)}


def find_architecture(source: Source) -> tuple[str | None, str, list[Note]]:
    """Return the name in config.json, else the one that the file or its directory has, with a note; and the tag.

    A tag, as in "vit_base_patch16_224.augreg_in1k", tells which weights of an architecture they are.
    """
    name = source.config.get("architecture")
    if isinstance(name, str):
        stated = source.config.get("pretrained_cfg")
        tag = stated.get("tag") if isinstance(stated, dict) else None
        name, _, tag_in_name = name.partition(".")
        return name, str(tag or tag_in_name), []
    name, tag = name_in_path(source.path)
    text = f"the architecture is {name}, by the name of the file; the file itself does not say."
    return name, tag, [Note(text, "architecture_by_name")] if name else []


def find_stated_size(source: Source, arguments: Fields, architecture: str, fields: Fields) -> Any:
    """Return the image size in config.json, else that in the name, if the positions are made for it."""
    if "embeds.pos_embed" in source.tensors:
        return None  # NaFlexVit resamples its positions to any size
    own, size = ViTConfig.cast_fields({"image_size": fields["image_size"]})["image_size"], size_in_name(architecture)
    fits = size and all(0 <= size - side < patch for side, patch in zip(own, fields["patch_size"], strict=True))
    return arguments.get("img_size") or (size if fits else None)


def combine(inferred: Fields, by_name: Fields, stated: Fields) -> Fields:
    """Combine what tensors, the architecture and config.json say; a later one wins, but tensors show SwiGLU."""
    fields = {**inferred, **by_name, **stated}
    if inferred.get("activation") == "swiglu":
        fields["activation"] = "swiglu"
    if fields["pooling"] != "attention":
        fields = {name: value for name, value in fields.items() if name not in POOL_FIELDS}
    if "rope" in fields:
        fields["pos_embed"] = "rotary"
        return fields
    return {name: value for name, value in fields.items() if name not in ROPE_FIELDS}


def has_key_bias(tensors: Tensors) -> bool:
    """Whether keys have a bias, if queries have one; `timm_names.unify` adds zeros where they have none."""
    queries = next((n for n in tensors if n.startswith("blocks.0.attn.q_") and n.endswith("bias")), "")
    return not queries or (queries.replace("q_proj", "k_proj") in tensors and "q_proj" in queries)


def guess_hidden(architecture: str | None, inferred: Fields, given: Fields, source: Source) -> Fields:
    """Return values of what the tensors do not show, where the file does not name a known architecture.

    For the tensors of an ordinary ViT they are documented defaults, which are printed; else the caller gives them.

    Raises:
        UnknownArchitectureError: The tensors are not those of an ordinary ViT, so that the values would be a guess.
    """
    if architecture is None and is_plain(inferred, source):
        return HIDDEN
    reason = UNKNOWN.format(architecture) if architecture else NAMELESS
    is_rotary = str(given.get("pos_embed", "")).endswith("rotary")
    names = ["num_heads", *HIDDEN] + ([] if inferred.get("pos_embed") == "relative" else ["pos_embed"])
    names += ["rope"] if is_rotary else []
    names += ["rope_reference"] if is_rotary and given.get("rope") in ("eva02", "pe") else []
    names += ["pool_heads", "pool_prefix"] if inferred["class_token"] and inferred["pooling"] == "attention" else []
    require_fields(given, names, reason)
    rotary = ROPE_FIELDS if is_rotary else ()
    return {name: given[name] for name in (*HIDDEN, *POOL_FIELDS, *rotary) if name in given}


def is_plain(inferred: Fields, source: Source) -> bool:
    """Whether the tensors are those of an ordinary ViT: class token, learned positions, LayerNorm, one linear head."""
    plain = inferred["class_token"] and inferred["pooling"] != "attention" and not inferred["norm_pre"]
    plain &= not (inferred["attention_norm"] or inferred["mlp_norm"] or "norm_layer" in inferred)
    plain &= "pos_embed" in source.tensors and "pos_embed" not in inferred  # and no table of relative positions
    return bool(plain and inferred["key_bias"] and "blocks.0.gamma_1" not in source.tensors)


def infer_size_of_tables(tensors: Tensors, fields: Fields) -> tuple[int, int]:
    """Return the image size that BEiT's tables of relative positions are made for; 224 for rotary positions."""
    table = tensors.get(f"blocks.0.attn.{TABLE}.patches")
    if table is None:
        return 224, 224  # rotary positions fit any size
    side = (math.isqrt(len(table)) + 1) // 2
    if (2 * side - 1) ** 2 != len(table):
        raise CheckpointError("The table of relative positions is not that of a square grid. Give image_size.")
    return side * fields["patch_size"][0], side * fields["patch_size"][1]


def choose_spellings(config: ViTConfig) -> list[str]:
    """Return the spellings of the class of timm that has a model's parts: Beit, Eva or VisionTransformer."""
    is_eva = config.has_rope or config.has_relative or not config.key_bias
    spellings = ["table"] if config.has_relative else []
    if is_eva:
        spellings += ["gamma"] if config.layer_scale is not None else []
        spellings += ["bias"] if config.qkv_bias and not config.key_bias else []
        spellings += ["frequencies"] if config.rope == "mixed" else []
    if config.activation == "swiglu" and (config.mlp_norm or config.norm_layer == "rms_norm"):
        spellings.append("mlp")
    return spellings
