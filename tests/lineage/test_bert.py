"""BERT against transformers, its masking against the paper's rates, its training on small texts."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from patchword.errors import CheckpointError, ConfigError
from patchword.lineage.bert import (
    IGNORED,
    Bert,
    BertClassifier,
    BertConfig,
    MaskedLanguageModel,
    mask_tokens,
    masked_loss,
)
from patchword.lineage.bert_checkpoint import load_bert
from patchword.lineage.bert_fit import CLS, MASK, PAD, SEP, SPECIAL, FitConfig, accuracy, finetune, make_batch, pretrain

VOCAB, LENGTHS = 40, (12, 7, 3)
TINY = {"embed_dim": 24, "depth": 2, "num_heads": 3, "mlp_dim": 56, "max_length": 16, "vocab_size": VOCAB}


def make_theirs(kind: type[nn.Module], **settings: Any) -> Any:
    """A tiny model of transformers. All its weights are random: zeros and ones would hide errors."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 56}
    limits = {"vocab_size": VOCAB, "max_position_embeddings": 16, "num_labels": 5, "pad_token_id": None}
    model = kind(transformers.BertConfig(**{**sizes, **limits, **settings}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def random_batch() -> dict[str, Tensor]:
    """Sequences of three lengths, in two segments each, padded with an ordinary token."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCAB, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    segments = (torch.arange(max(LENGTHS)) > 1).long().expand_as(tokens)
    return {"tokens": tokens, "mask": mask, "segments": segments}


def run_theirs(model: Any, batch: dict[str, Tensor]) -> Any:
    names = {"tokens": "input_ids", "segments": "token_type_ids"}
    with torch.no_grad():
        return model(**{names[n]: t for n, t in batch.items() if n in names}, attention_mask=batch["mask"].long())


def edit_config(folder: Path, **settings: Any) -> None:
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, **settings}))


def edit_tensors(folder: Path, remove: tuple[str, ...] = (), **added: Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name not in remove}
    save_file({**kept, **added}, folder / "model.safetensors")


@pytest.fixture
def masked_folder(tmp_path: Path) -> Path:
    return save(make_theirs(transformers.BertForMaskedLM), tmp_path)


# Parity with transformers


@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
def test_encoder_and_pooler_agree_with_transformers(tmp_path: Path, activation: str) -> None:
    theirs = make_theirs(transformers.BertModel, hidden_act=activation)
    ours, batch = load_bert(save(theirs, tmp_path)), random_batch()
    assert isinstance(ours, Bert)
    expected = run_theirs(theirs, batch)
    with torch.no_grad():
        features, pooled = ours.forward_features(**batch), ours(**batch)
    real = batch["mask"]
    torch.testing.assert_close(features[real], expected.last_hidden_state[real], rtol=0, atol=1e-5)
    torch.testing.assert_close(pooled, expected.pooler_output, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [transformers.BertForMaskedLM, transformers.BertForPreTraining])
def test_masked_language_model_agrees_with_transformers(tmp_path: Path, kind: Any) -> None:
    theirs = make_theirs(kind)
    ours, batch = load_bert(save(theirs, tmp_path)), random_batch()
    assert isinstance(ours, MaskedLanguageModel)
    expected = run_theirs(theirs, batch)
    logits = expected.logits if kind is transformers.BertForMaskedLM else expected.prediction_logits
    with torch.no_grad():
        actual = ours(**batch)
    torch.testing.assert_close(actual[batch["mask"]], logits[batch["mask"]], rtol=0, atol=1e-5)


def test_classifier_agrees_with_transformers(tmp_path: Path) -> None:
    theirs = make_theirs(transformers.BertForSequenceClassification)
    ours, batch = load_bert(save(theirs, tmp_path)), random_batch()
    assert isinstance(ours, BertClassifier)
    with torch.no_grad():
        torch.testing.assert_close(ours(**batch), run_theirs(theirs, batch).logits, rtol=0, atol=1e-5)


def test_defaults_are_no_padding_and_segment_a(tmp_path: Path) -> None:
    theirs = make_theirs(transformers.BertModel)
    ours, tokens = load_bert(save(theirs, tmp_path)), random_batch()["tokens"]
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).pooler_output, rtol=0, atol=1e-5)


def test_base_has_the_parameters_of_bert_base() -> None:
    """BERT-base, uncased, has 109,482,240 parameters."""
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in Bert(BertConfig()).parameters()) == 109_482_240


# The encoder


@pytest.fixture
def bert() -> Bert:
    torch.manual_seed(0)
    return Bert(BertConfig.from_json({**TINY, "init_std": 0.2})).eval()


def test_padding_changes_nothing(bert: Bert) -> None:
    batch = random_batch()
    with torch.no_grad():
        features = bert.forward_features(**batch)
        for row, length in enumerate(LENGTHS):
            single = bert.forward_features(
                batch["tokens"][row : row + 1, :length], segments=batch["segments"][row : row + 1, :length]
            )
            torch.testing.assert_close(features[row, :length], single[0], rtol=0, atol=1e-5)


def test_segments_and_order_matter(bert: Bert) -> None:
    tokens = random_batch()["tokens"]
    with torch.no_grad():
        reference = bert(tokens)
        assert (bert(tokens, segments=torch.ones_like(tokens)) - reference).abs().max() > 0.01
        assert (bert(tokens[:, [0, *range(11, 0, -1)]]) - reference).abs().max() > 0.01


def test_masked_attention_runs_fused(bert: Bert) -> None:
    """Within this context torch refuses every call that its fused kernel cannot compute."""
    batch = random_batch()
    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        fused = bert.forward_features(**batch)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(bert.forward_features(**batch), fused, rtol=0, atol=1e-5)


def test_dropout_is_where_bert_has_it() -> None:
    """After the embeddings and both branches of a block, but not inside of the MLP."""
    bert = Bert(BertConfig.from_json({**TINY, "dropout": 0.3}))
    rates = {name: module.p for name, module in bert.named_modules() if isinstance(module, nn.Dropout)}
    assert rates == {"drop": 0.3} | {f"blocks.{i}.add{j}.drop": 0.3 for i in range(2) for j in (1, 2)}


def test_too_long_sequences_are_refused(bert: Bert) -> None:
    with pytest.raises(ConfigError, match="17"):
        bert(torch.zeros(1, 17, dtype=torch.long))


def test_invalid_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="heads"):
        BertConfig.from_json({**TINY, "num_heads": 5})
    with pytest.raises(ConfigError, match="vocab_size"):
        BertConfig.from_json({**TINY, "vocab_size": 0})


def test_decoder_and_token_embeddings_are_tied() -> None:
    model = MaskedLanguageModel(BertConfig.from_json(TINY))
    assert [name for name, p in model.named_parameters() if p.shape == (VOCAB, 24)] == ["bert.token_embed.weight"]
    features = torch.randn(4, 24)
    before = model.predict_tokens(features)
    with torch.no_grad():
        model.bert.token_embed.weight[7] += 1.0
    changed = (model.predict_tokens(features) != before).any(dim=0)
    assert changed.nonzero().flatten().tolist() == [7]


def test_a_new_classifier_predicts_zeros() -> None:
    logits = BertClassifier(BertConfig.from_json(TINY), 3)(random_batch()["tokens"])
    torch.testing.assert_close(logits, torch.zeros(3, 3), rtol=0, atol=0)


# Masking


def test_masking_rates_are_those_of_the_paper() -> None:
    tokens = torch.randint(len(SPECIAL), 1000, (1000, 200), generator=torch.Generator().manual_seed(5))
    tokens[:, 0], tokens[:, -5], tokens[:, -4:] = CLS, SEP, PAD
    inputs, labels = mask_tokens(
        tokens, mask_token=MASK, special=SPECIAL, vocab_size=1000, generator=torch.Generator().manual_seed(6)
    )
    chosen, special = labels != IGNORED, tokens < len(SPECIAL)
    assert not chosen[special].any()
    assert torch.equal(inputs[~chosen], tokens[~chosen])
    assert torch.equal(labels[chosen], tokens[chosen])
    assert chosen[~special].float().mean().item() == pytest.approx(0.15, abs=0.01)
    hidden, kept = inputs[chosen] == MASK, inputs[chosen] == tokens[chosen]
    drawn = inputs[chosen][~hidden & ~kept]
    assert hidden.float().mean().item() == pytest.approx(0.8, abs=0.01)
    assert kept.float().mean().item() == pytest.approx(0.1, abs=0.01)
    assert len(drawn) / int(chosen.sum()) == pytest.approx(0.1, abs=0.01)
    assert drawn.min() >= len(SPECIAL)
    assert len(drawn.unique()) > 900  # 2,900 draws from all of the vocabulary


def test_masking_depends_only_on_the_generator() -> None:
    tokens = random_batch()["tokens"]

    def mask(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return mask_tokens(tokens, mask_token=MASK, special=SPECIAL, vocab_size=VOCAB, generator=generator)[0]

    assert torch.equal(mask(1), mask(1))
    assert not torch.equal(mask(1), mask(2))


def test_loss_counts_chosen_tokens_only() -> None:
    logits, labels = torch.randn(2, 3, 5), torch.full((2, 3), IGNORED)
    assert masked_loss(logits, labels).item() == 0.0
    labels[1, 2] = 4
    torch.testing.assert_close(masked_loss(logits, labels), -logits[1, 2].log_softmax(dim=-1)[4])


# Reading transformers' folders


def test_old_tensor_names_are_read(masked_folder: Path) -> None:
    """Weights of 2018 call LayerNorm's tensors gamma and beta, and store positions and the tied decoder."""
    expected = load_bert(masked_folder).state_dict()
    tensors = load_file(masked_folder / "model.safetensors")
    names = {name: name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta") for name in tensors}
    old = {names[name]: tensor for name, tensor in tensors.items()}
    old["bert.embeddings.position_ids"] = torch.arange(16)[None]
    old["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    old["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
    save_file(old, masked_folder / "model.safetensors")
    actual = load_bert(masked_folder).state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_half_precision_is_read_as_float32(masked_folder: Path) -> None:
    tensors = load_file(masked_folder / "model.safetensors")
    save_file({name: tensor.half() for name, tensor in tensors.items()}, masked_folder / "model.safetensors")
    model = load_bert(masked_folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model_type": "roberta"}, "model_type"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"hidden_act": ["gelu"]}, "hidden_act"),
        ({"is_decoder": True}, "is_decoder"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"tie_word_embeddings": False}, "decoder.weight"),
        ({"hidden_size": "wide"}, "embed_dim"),
        ({"num_attention_heads": 7}, "heads"),
        ({"num_hidden_layers": 3}, "encoder.layer.2"),
        ({"num_hidden_layers": 1}, "encoder.layer.1"),
        ({"vocab_size": 41}, "word_embeddings"),
    ],
)
def test_other_models_are_refused(masked_folder: Path, settings: dict[str, Any], named: str) -> None:
    edit_config(masked_folder, **settings)
    with pytest.raises(CheckpointError, match=named) as caught:
        load_bert(masked_folder)
    assert str(masked_folder) in str(caught.value)


def test_unstated_sizes_are_refused(masked_folder: Path) -> None:
    document = json.loads((masked_folder / "config.json").read_text())
    del document["num_attention_heads"]
    (masked_folder / "config.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="num_attention_heads"):
        load_bert(masked_folder)


def test_missing_and_unexpected_tensors_are_named(masked_folder: Path) -> None:
    absent = "bert.encoder.layer.1.attention.self.key.bias"
    edit_tensors(masked_folder, (absent,), **{"qa_outputs.weight": torch.zeros(2, 24)})
    with pytest.raises(CheckpointError, match="missing: .*1.attention.self.key.bias; unexpected: .*qa_outputs.weight"):
        load_bert(masked_folder)


@pytest.mark.parametrize("name", ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias"])
def test_an_untied_decoder_is_refused(masked_folder: Path, name: str) -> None:
    shape = (VOCAB, 24) if name.endswith("weight") else (VOCAB,)
    edit_tensors(masked_folder, **{name: torch.ones(shape)})
    with pytest.raises(CheckpointError, match=name):
        load_bert(masked_folder)


def test_a_classifier_of_tokens_is_refused(tmp_path: Path) -> None:
    """Its classifier looks like that of sequences, but it has no pooler."""
    with pytest.raises(CheckpointError, match="pooler"):
        load_bert(save(make_theirs(transformers.BertForTokenClassification), tmp_path))


def test_a_damaged_head_is_refused(tmp_path: Path) -> None:
    folder = save(make_theirs(transformers.BertForSequenceClassification), tmp_path)
    edit_tensors(folder, **{"classifier.weight": torch.tensor(1.0)})
    with pytest.raises(CheckpointError, match="classifier.weight"):
        load_bert(folder)


def test_pickled_weights_are_not_read(masked_folder: Path) -> None:
    torch.save(load_file(masked_folder / "model.safetensors"), masked_folder / "pytorch_model.bin")
    (masked_folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model.safetensors"):
        load_bert(masked_folder)


# Training

COUNTING = [[4 + (start + step) % 8 for step in range(6)] for start in range(8)]  # each token determines the next


def counting_config() -> BertConfig:
    sizes = {"embed_dim": 32, "depth": 1, "num_heads": 2, "mlp_dim": 64, "max_length": 8, "vocab_size": 12}
    return BertConfig.from_json({**sizes, "init_std": 0.15})


def test_batches_have_borders_padding_and_segments() -> None:
    tokens, mask, segments = make_batch([[4, SEP, 5, 6], [7]])
    assert tokens.tolist() == [[CLS, 4, SEP, 5, 6, SEP], [CLS, 7, SEP, PAD, PAD, PAD]]
    assert mask.tolist() == [[True] * 6, [True] * 3 + [False] * 3]
    assert segments[0].tolist() == [0, 0, 0, 1, 1, 1]
    assert segments[1, :3].tolist() == [0, 0, 0]


@pytest.mark.slow
def test_pretraining_learns_a_text_and_is_deterministic() -> None:
    _, first = pretrain(COUNTING, counting_config(), FitConfig(20, seed=1, lr=3e-3))
    state = torch.random.get_rng_state()
    model, last = pretrain(COUNTING, counting_config(), FitConfig(300, seed=1, lr=3e-3))
    assert torch.equal(state, torch.random.get_rng_state())
    assert first["loss"] > 1.9  # guessing one of eight tokens is ln 8 = 2.08
    assert last["loss"] < 0.7
    assert last["accuracy"] > 0.8
    again, _ = pretrain(COUNTING, counting_config(), FitConfig(300, seed=1, lr=3e-3))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.slow
def test_finetuning_starts_from_the_pretrained_encoder() -> None:
    config = counting_config()
    pretrained, _ = pretrain(COUNTING, config, FitConfig(5, seed=1, lr=1e-3))
    labels = [start % 2 for start in range(8)]
    still, _ = finetune(COUNTING, labels, 2, config, FitConfig(1, seed=1, lr=0.0), pretrained)
    pairs = zip(still.bert.parameters(), pretrained.bert.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    model, metrics = finetune(COUNTING, labels, 2, config, FitConfig(150, seed=1, lr=2e-3), pretrained)
    assert metrics["loss"] < 0.3
    assert accuracy(model, COUNTING, labels) == 1.0
    assert accuracy(model, COUNTING, [1 - label for label in labels]) == 0.0
    changed = [not torch.equal(a, b) for a, b in zip(model.parameters(), still.parameters(), strict=True)]
    assert all(itertools.islice(changed, 3))
