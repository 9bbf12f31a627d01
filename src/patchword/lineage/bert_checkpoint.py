"""Reads the BERT weights that transformers saves."""

from pathlib import Path
from typing import Any

import torch

from ..checkpoints.family import get_shape
from ..checkpoints.mapping import Rule, TensorMap, Tensors, from_foreign, in_file
from ..checkpoints.tensor_files import read_tensors
from ..core.io import read_json
from ..errors import CheckpointError, ConfigError
from .bert import Bert, BertClassifier, BertConfig, MaskedLanguageModel

Model = Bert | MaskedLanguageModel | BertClassifier

# Our names and those of transformers' BertModel; those of heads follow.
LAYER = "encoder.layer.{}"
NAMES: TensorMap = {
    "token_embed": Rule("embeddings.word_embeddings"),
    "position_embed": Rule("embeddings.position_embeddings"),
    "segment_embed": Rule("embeddings.token_type_embeddings"),
    "embed_norm": Rule("embeddings.LayerNorm"),
    "blocks.{}.attention.qkv": Rule(LAYER + ".attention.self", (".query", ".key", ".value")),
    "blocks.{}.attention.out": Rule(LAYER + ".attention.output.dense"),
    "blocks.{}.norm1": Rule(LAYER + ".attention.output.LayerNorm"),
    "blocks.{}.mlp.fc1": Rule(LAYER + ".intermediate.dense"),
    "blocks.{}.mlp.fc2": Rule(LAYER + ".output.dense"),
    "blocks.{}.norm2": Rule(LAYER + ".output.LayerNorm"),
    "pooler": Rule("pooler.dense"),
    "transform": Rule("cls.predictions.transform.dense"),
    "transform_norm": Rule("cls.predictions.transform.LayerNorm"),
    "decoder_bias": Rule("cls.predictions.bias"),
    "head": Rule("classifier"),
}
FIELDS = {"vocab_size": "vocab_size", "max_position_embeddings": "max_length", "type_vocab_size": "num_segments"}
FIELDS |= {"hidden_size": "embed_dim", "num_hidden_layers": "depth", "num_attention_heads": "num_heads"}
FIELDS |= {"intermediate_size": "mlp_dim", "hidden_act": "activation"}
OPTIONAL = {"layer_norm_eps": "norm_eps", "hidden_dropout_prob": "dropout"}  # the authors' files state no epsilon
OPTIONAL |= {"attention_probs_dropout_prob": "attention_dropout"}
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
REQUIRED = {"model_type": "bert", "position_embedding_type": "absolute", "is_decoder": False}
REQUIRED |= {"add_cross_attention": False}
CLASSIFIER, TRANSFORM = "classifier.weight", "cls.predictions.transform.dense.weight"  # the heads' tensors
COPIES = {"cls.predictions.decoder.weight": "embeddings.word_embeddings.weight"}  # tied, but stored by older versions
COPIES |= {"cls.predictions.decoder.bias": "cls.predictions.bias"}


def load_bert(folder: str | Path) -> Model:
    """Reads a folder that transformers' `save_pretrained` wrote, and returns the model in evaluation mode.

    `BertModel` becomes a `Bert`, `BertForMaskedLM` and `BertForPreTraining` (without its next sentence prediction) a
    `MaskedLanguageModel`, and `BertForSequenceClassification` a `BertClassifier`. Only model.safetensors is read.

    Raises:
        CheckpointError: A file is absent or damaged, or the model computes something that `Bert` does not.
    """
    folder = Path(folder)
    settings = read_json(folder / "config.json")
    tensors, _ = read_tensors(folder / "model.safetensors")
    try:
        tensors = rename_tensors(tensors, tied=settings.get("tie_word_embeddings", True) is True)
        classes = get_shape(tensors, CLASSIFIER, 2)[0] if CLASSIFIER in tensors else 0
        config = parse_config(settings, pooler=bool(classes) or "pooler.dense.weight" in tensors)
        with torch.device("meta"):  # shapes only: nothing is allocated before they are known to fit
            model: Model = BertClassifier(config, classes) if classes else Bert(config)
            model = MaskedLanguageModel(config) if TRANSFORM in tensors else model
        ours = {name.removeprefix("bert."): tensor for name, tensor in model.state_dict().items()}
        state = from_foreign(tensors, config.encoder, NAMES, "BERT", ours)
    except (ConfigError, CheckpointError) as error:
        raise in_file(str(folder), error) from None
    named = {name: state[name.removeprefix("bert.")].float() for name in model.state_dict()}
    model.load_state_dict(named, assign=True)
    return model.eval()


def parse_config(settings: dict[str, Any], *, pooler: bool) -> BertConfig:
    """Reads transformers' config.json; refuses what `Bert` does not compute."""
    for name, value in REQUIRED.items():
        if settings.get(name, value) != value:
            raise CheckpointError(f"config.json: {name} is {settings[name]!r}; only {value!r} can be read.")
    if absent := [name for name in FIELDS if name not in settings]:
        raise CheckpointError(f"config.json does not state {', '.join(absent)}.")
    if (activation := settings["hidden_act"]) not in tuple(ACTIVATIONS):
        raise CheckpointError(f"config.json: hidden_act is {activation!r}; known: {', '.join(ACTIVATIONS)}.")
    fields = {ours: settings[name] for name, ours in {**FIELDS, **OPTIONAL}.items() if name in settings}
    return BertConfig.from_json({**fields, "activation": ACTIVATIONS[activation], "pooler": pooler})


def rename_tensors(tensors: Tensors, *, tied: bool) -> Tensors:
    """Removes what the classes and versions of transformers write differently, and what is not used."""
    result = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("bert.").replace("LayerNorm.gamma", "LayerNorm.weight")
        result[name.replace("LayerNorm.beta", "LayerNorm.bias")] = tensor
    result.pop("embeddings.position_ids", None)  # 0, 1, 2, ...
    if TRANSFORM not in result:
        return result
    for copy, original in COPIES.items():
        if not tied or (copy in result and not torch.equal(result[copy], result.get(original, result[copy]))):
            raise CheckpointError(f"{copy} is not tied to {original}: this model cannot be read.")
        if copy in result:
            result.setdefault(original, result.pop(copy))
    return {name: tensor for name, tensor in result.items() if not name.startswith("cls.seq_relationship.")}
