"""Training of text models: a seed repeats bit for bit, greedy decoding counts whole sequences, alignments, schedule."""

import pytest
import torch
from torch import Tensor, nn

from patchword.errors import ConfigError, TrainingError
from patchword.lineage.fit import TextConfig, fit, initial_gradients, lr_factor
from patchword.lineage.greedy_decoding import align, evaluate_greedy, greedy
from patchword.lineage.tasks import Task, make_task
from patchword.lineage.vocabulary import EOS

SHORT = TextConfig(min_length=2, max_length=3, dim=32, batch_size=64)


class Oracle(nn.Module):
    """Writes the reversed source, but for strings of three letters makes a mistake in the last letter."""

    def start(self, source: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, int]:
        return source, lengths, 0

    def step(
        self, token: Tensor, context: tuple[Tensor, Tensor, int]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, int]]:
        source, lengths, written = context
        rows = []
        for row, n in zip(source.tolist(), lengths.tolist(), strict=True):
            letters = row[: n - 1][::-1]
            if len(letters) == 3:
                letters[-1] = 3 + (letters[-1] - 2) % 26
            rows.append(letters[written] if written < len(letters) else EOS)
        logits = nn.functional.one_hot(torch.tensor(rows), 29).float()
        return logits, torch.full(source.shape, 1 / source.shape[1]), (source, lengths, written + 1)


def letters() -> Task:
    return make_task("reverse", 2, 3)


def test_a_single_wrong_token_makes_a_sequence_wrong() -> None:
    accuracy, by_length = evaluate_greedy(Oracle(), letters())  # type: ignore[arg-type]
    assert by_length == {2: 1.0, 3: 0.0}
    assert accuracy == 0.5


def test_greedy_decoding_stops_at_the_end_or_at_the_limit() -> None:
    outputs, weights = greedy(Oracle(), letters(), [("a", "b"), ("c", "d")], max_length=10)  # type: ignore[arg-type]
    assert outputs == [("b", "a"), ("d", "c")]
    assert weights is not None
    assert weights.shape[1] == 3, "two letters and <eos>"
    outputs, _ = greedy(Oracle(), letters(), [("a", "b")], max_length=1)  # type: ignore[arg-type]
    assert outputs == [("b",)]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["rnn", "gru", "lstm", "transformer"])
def test_models_learn_and_repeat_bit_for_bit(model: str) -> None:
    config = SHORT.replace(model=model, lr=5e-3)
    first = fit(config, seed=1, steps=25)
    assert first.steps == 25
    assert first.loss < fit(config, seed=1, steps=2).loss - 0.3, "the loss falls"
    again = fit(config, seed=1, steps=25)
    assert first.loss == again.loss
    assert first.by_length == again.by_length
    for one, other in zip(first.model.state_dict().values(), again.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert fit(config, seed=2, steps=25).loss != first.loss


@pytest.mark.slow
def test_attention_finds_the_letters() -> None:
    """After training, each letter that is written has its largest weight on the letter that it copies."""
    result = fit(SHORT.replace(lr=5e-3, max_length=5), seed=0, steps=300)
    alignment = align(result.model, make_task("reverse", 2, 5), tuple("abcd"))
    assert alignment.output == tuple("dcba")
    weights = torch.tensor(alignment.weights)
    assert weights.shape == (4, 4)
    assert weights.argmax(dim=1).tolist() == [3, 2, 1, 0]


def test_budget_in_seconds_uses_the_clock() -> None:
    clock = iter(range(1000))
    result = fit(SHORT, seconds=10, now=lambda: float(next(clock)))
    assert result.steps == 9, "a step lasts a second of this clock, which the start reads, too"


def test_warmup_then_linear_decrease() -> None:
    config = SHORT.replace(warmup_fraction=0.2)
    assert [round(lr_factor(config, p), 6) for p in (0.0, 0.1, 0.2, 0.6, 1.0)] == [0.0, 0.5, 1.0, 0.5, 0.0]
    assert lr_factor(SHORT.replace(warmup_fraction=0.0), 0.0) == 1.0


def test_divergence_is_an_error_with_a_code() -> None:
    with pytest.raises(TrainingError) as error:
        fit(SHORT.replace(model="transformer", lr=1e30, clip_grad_norm=None), steps=20)
    assert error.value.code == "not_finite"


@pytest.mark.parametrize("fields", [{"dim": 31}, {"dim": 34, "num_heads": 4}, {"lr": 0.0}, {"task": "translate"}])
def test_invalid_configs_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        TextConfig(**fields)  # type: ignore[arg-type]


def test_post_norm_has_larger_gradients_near_the_output_than_pre_norm() -> None:
    deep = SHORT.replace(model="transformer", depth=6, dim=64, max_length=6)
    post, pre = (initial_gradients(deep.replace(pre_norm=pre_norm), seed=0) for pre_norm in (False, True))
    assert len(post) == len(pre) == 12
    assert post[-1] > 2 * pre[-1]
