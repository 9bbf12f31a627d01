"""transformers' BEiT, BEiT v2 and Data2Vec-Vision: relative positions, which include the class token."""

from typing import Any, ClassVar

import torch

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
    note_if,
)
from ..mapping import OffsetTable, Patch, Rule, TensorMap, Transposed, add_key_bias, remove_key_bias
from .transformers_json import (
    check_switches,
    parse_activation,
    parse_labels,
    parse_preprocess,
    require_config,
    shared_config,
    transformers_processor,
)

PROJECTION = "embeddings.patch_embeddings.projection.weight"
LAYER = "encoder.layer.{}"
ATTENTION = LAYER + ".attention.attention"
TABLE = "relative_position_bias.relative_position_bias_table"
SHARED_TABLE = "encoder." + TABLE
PREFIX_ROWS = 3  # at the end of a table: class token to patches, patches to it, and the class token to itself
TENSOR_MAP: TensorMap = {
    "class_token": Rule("embeddings.cls_token"),
    "positions.table": Rule("embeddings.position_embeddings"),
    "patch_embed.proj": Patch("embeddings.patch_embeddings.projection"),
    "blocks.{}.norm1": Rule(LAYER + ".layernorm_before"),
    "blocks.{}.attention.qkv": Rule(ATTENTION, (".query", ".key", ".value")),
    "blocks.{}.attention.bias.relative": OffsetTable(f"{ATTENTION}.{TABLE}.patches"),
    "blocks.{}.attention.bias.prefix": Transposed(f"{ATTENTION}.{TABLE}.prefix"),
    "blocks.{}.attention.out": Rule(LAYER + ".attention.output.dense"),
    "blocks.{}.add1.gamma": Rule(LAYER + ".lambda_1"),
    "blocks.{}.norm2": Rule(LAYER + ".layernorm_after"),
    "blocks.{}.mlp.fc1": Rule(LAYER + ".intermediate.dense"),
    "blocks.{}.mlp.fc2": Rule(LAYER + ".output.dense"),
    "blocks.{}.add2.gamma": Rule(LAYER + ".lambda_2"),
    "norm": Rule("layernorm"),
    "head": Rule("classifier"),
}
MEAN_POOLING = {"norm": Rule("pooler.layernorm")}
KEYS, QUERIES = ".key.bias", ".query.bias"
CLASSES = {"beit": "Beit", "data2vec-vision": "Data2VecVision"}


class TransformersBEiT(Family):
    """huggingface/transformers: BEiT and Data2Vec-Vision."""

    name = "transformers"
    variant = "beit"
    supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "pos_embed": ("relative", "learned+relative"),
        "relative_prefix": (True,),
        "class_token": (True,),
        "pooling": ("class", "average"),
        "num_registers": (0,),
    }
    defaults: ClassVar[Fields] = {"pos_embed_resample": "transformers", "relative_prefix": True}
    preprocess: ClassVar[Fields] = {"resize": "squash"}
    passthrough: ClassVar[dict[str, str]] = {"mask_token": "embeddings.mask_token"}

    def matches(self, source: Source) -> bool:
        if str(source.config.get("model_type")) in CLASSES:
            return any(n.endswith(PROJECTION) for n in source.tensors)
        names = source.tensors
        return any(n.endswith(PROJECTION) for n in names) and any(TABLE in n for n in names)

    def normalize(self, source: Source) -> tuple[Tensors, Fields]:
        prefix = next((n.removesuffix(PROJECTION) for n in source.tensors if n.endswith(PROJECTION)), "")
        tensors = {
            n.removeprefix(prefix): t
            for n, t in source.tensors.items()
            if not n.startswith("lm_head.") and not n.endswith("relative_position_index")
        }
        quirks: Fields = {"prefix": prefix}
        if source.config.get("model_type"):
            quirks["model_type"] = source.config["model_type"]
        if SHARED_TABLE in tensors:
            quirks["shared_table"] = True
            shared = tensors.pop(SHARED_TABLE)
            blocks = range(count_blocks(tensors, "encoder.layer.", "."))
            tensors |= {f"{ATTENTION.format(i)}.{TABLE}": shared for i in blocks}
        return split_tables(add_key_bias(tensors, QUERIES, KEYS), TABLE), quirks

    def denormalize(self, tensors: Tensors, config: ViTConfig, quirks: Fields) -> Tensors:
        tensors = join_tables(tensors if config.key_bias else remove_key_bias(tensors, KEYS), TABLE)
        if quirks.get("shared_table"):
            names = [f"{ATTENTION.format(i)}.{TABLE}" for i in range(config.depth)]
            if all(torch.equal(tensors[name], tensors[names[0]]) for name in names):  # not after training
                shared = tensors[names[0]]
                tensors = {**{n: t for n, t in tensors.items() if n not in names}, SHARED_TABLE: shared}
        prefix = quirks.get("prefix", "beit.")
        return {n if n.startswith("classifier.") else prefix + n: t for n, t in tensors.items()}

    def read_metadata(self, source: Source, tensors: Tensors, overrides: Fields) -> Metadata:
        if not any(TABLE in n for n in tensors):
            raise CheckpointError("This BEiT has no relative positions; patchword reads only those that have them.")
        unstated = require_config(source, overrides, "norm_eps", "activation", "num_heads")
        config = source.config
        width, channels, ph, pw = get_shape(tensors, PROJECTION, 4)
        fields: Fields = {**self.defaults, "patch_size": (ph, pw), "in_channels": channels, "embed_dim": width}
        fields |= {
            "depth": config.get("num_hidden_layers", count_blocks(tensors, "encoder.layer.", ".")),
            "image_size": config.get("image_size", 224),
        }
        fields["num_heads"] = config.get("num_attention_heads", 12)
        fields["norm_eps"] = config.get("layer_norm_eps", 1e-12)
        fields["activation"] = parse_activation(config, "gelu")
        fields["mlp_dim"] = get_shape(tensors, "encoder.layer.0.intermediate.dense.weight", 2)[0]
        fields["layer_scale"] = 1.0 if "encoder.layer.0.lambda_1" in tensors else None
        fields["key_bias"] = any(n.endswith(KEYS) for n in source.tensors)
        fields["num_classes"] = get_shape(tensors, "classifier.weight", 2)[0] if "classifier.weight" in tensors else 0
        has_table = "embeddings.position_embeddings" in tensors
        check_switches(config, seen_positions(source))
        check_tables(source, TABLE, {**fields, **overrides})
        fields |= {"pos_embed": "learned+relative" if has_table else "relative", "pos_embed_prefix": int(has_table)}
        fields |= infer_pooling(tensors, fields["num_classes"], config.get("use_mean_pooling", True))
        pools = fields["num_classes"] or fields.get("norm_after_pool") or fields["pooling"] == "class"
        return Metadata(
            fields,
            preprocess=parse_preprocess(source.processor),
            labels=parse_labels(config.get("id2label")),
            notes=note_if(
                source, ("lm_head.",), Note("the head of masked pre-training is not read.", "decoder_skipped")
            ),
            assumed=unstated | ({} if pools else {"pooling": "this model does not pool"}),
            architecture=config.get("model_type", "beit"),
        )

    def num_positioned_tokens(self, config: ViTConfig) -> int:
        return int(config.absolute_pos_embed == "learned")

    def tensor_map(self, config: ViTConfig) -> TensorMap:
        return {**TENSOR_MAP, **MEAN_POOLING} if config.norm_after_pool else TENSOR_MAP

    def sidecars(
        self, config: ViTConfig, labels: tuple[str, ...] | None, preprocess: Fields, quirks: Fields
    ) -> dict[str, Fields]:
        kind = quirks.get("model_type", "beit")
        name = CLASSES.get(kind, "Beit") + ("ForImageClassification" if config.num_classes else "Model")
        result: Fields = {"architectures": [name], "model_type": kind, **shared_config(config, labels)}
        result |= {"intermediate_size": config.mlp_dim, "use_mean_pooling": config.norm_after_pool}
        result["use_shared_relative_position_bias"] = bool(quirks.get("shared_table"))
        result["use_relative_position_bias"] = not quirks.get("shared_table")
        result["use_absolute_position_embeddings"] = config.absolute_pos_embed == "learned"
        result["layer_scale_init_value"] = config.layer_scale or 0.0
        return {"config.json": result, "preprocessor_config.json": transformers_processor(preprocess)}


def seen_positions(source: Source) -> Fields:
    """Return which kinds of positions the tensors have, under transformers' names."""
    names = [n for n in source.tensors if n.endswith(TABLE)]
    shared = [n for n in names if n.endswith(SHARED_TABLE) and "layer." not in n]
    return {
        "use_shared_relative_position_bias": shared,
        "use_relative_position_bias": len(names) > len(shared),
        "use_absolute_position_embeddings": any(n.endswith("embeddings.position_embeddings") for n in source.tensors),
    }


def check_tables(source: Source, table: str, fields: Fields) -> None:
    """Raise an error if the tables of relative positions are not made for this number of heads."""
    heads = ViTConfig.cast_fields({"num_heads": fields["num_heads"]})["num_heads"]
    name = next(n for n in source.tensors if n.endswith(table))
    columns = get_shape(source.tensors, name, 2)[1]
    if columns != heads:
        raise CheckpointError(
            f"{name} has a column for each of {columns} heads, but num_heads is {heads}: "
            "correct --num-heads (num_heads in Python)."
        )


def infer_pooling(tensors: Tensors, num_classes: int, mean_pooling: bool) -> Fields:
    """Infer pooling and the last norm: without a pooler, as in masked pre-training, the model returns its tokens."""
    if not mean_pooling:
        return {"pooling": "class"}
    if num_classes or "pooler.layernorm.weight" in tensors:
        return {"pooling": "average", "norm_after_pool": True}
    return {"pooling": "average", "final_norm": "layernorm.weight" in tensors}


def split_tables(tensors: Tensors, table: str) -> Tensors:
    """Split the last rows, of the class token, from all tables of relative positions."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(table):
            result |= {f"{name}.patches": tensor[:-PREFIX_ROWS], f"{name}.prefix": tensor[-PREFIX_ROWS:]}
        else:
            result[name] = tensor
    return result


def join_tables(tensors: Tensors, table: str) -> Tensors:
    """The inverse of `split_tables`."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(f"{table}.patches"):
            rest = tensors[name.removesuffix("patches") + "prefix"]
            result[name.removesuffix(".patches")] = torch.cat([tensor, rest])
        elif not name.endswith(f"{table}.prefix"):
            result[name] = tensor
    return result
