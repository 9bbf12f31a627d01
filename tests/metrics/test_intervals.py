"""Metrics against scikit-learn, manually computed cases and simulations."""

import numpy as np
import pytest
import torch
from sklearn import metrics as oracle

from patchword.metrics.calibration import (
    calibration_error,
    equal_mass_bins,
    equal_width_bins,
    expected_calibration_error,
    fit_temperature,
)
from patchword.metrics.classification import ClassificationMetrics
from patchword.metrics.intervals import bootstrap_mean, bootstrap_statistics, compare_paired, wilson
from patchword.metrics.multilabel import MultiLabelMetrics
from patchword.metrics.per_class import (
    average_precision,
    class_intervals,
    class_rows,
    confusion_matrix,
    multi_label_class_rows,
    per_class_metrics,
)

RNG = np.random.default_rng(0)


def test_per_class_metrics_agree_with_scikit_learn() -> None:
    targets, predicted = RNG.integers(0, 6, 500), RNG.integers(0, 5, 500)  # class 5 is never predicted
    metrics = per_class_metrics(targets, predicted, 6)
    expected = oracle.precision_recall_fscore_support(targets, predicted, labels=range(6), zero_division=np.nan)
    np.testing.assert_allclose(metrics.precision, expected[0])
    np.testing.assert_allclose(metrics.recall, expected[1])
    np.testing.assert_allclose(metrics.f1, np.nan_to_num(expected[2]))
    np.testing.assert_array_equal(metrics.support, expected[3])
    assert metrics.balanced_accuracy == pytest.approx(oracle.balanced_accuracy_score(targets, predicted))
    assert metrics.macro_f1 == pytest.approx(oracle.f1_score(targets, predicted, average="macro"))
    matrix = confusion_matrix(targets, predicted, 6)
    assert matrix.shape == (6, 6)
    assert matrix[2, 3] == ((targets == 2) & (predicted == 3)).sum()
    np.testing.assert_array_equal(matrix.sum(axis=0), np.bincount(predicted, minlength=6))


def test_classes_without_images_are_ignored() -> None:
    metrics = per_class_metrics(np.array([0, 0, 1]), np.array([0, 1, 1]), 3)
    assert metrics.balanced_accuracy == pytest.approx(0.75)
    assert np.isnan(metrics.recall[2])
    assert metrics.macro_f1 == pytest.approx((2 / 3 + 2 / 3) / 2)


def test_brier_score_agrees_with_scikit_learn() -> None:
    probability, targets = RNG.random(200), RNG.integers(0, 2, 200)
    accumulated = ClassificationMetrics()
    accumulated.update(torch.from_numpy(np.log(np.stack([1 - probability, probability], axis=1))), targets.tolist())
    metrics, intervals = accumulated.compute_with_intervals(2)
    assert metrics["brier"] == pytest.approx(2 * oracle.brier_score_loss(targets, probability))
    assert metrics["nll"] == pytest.approx(oracle.log_loss(targets, probability))
    assert all(low <= metrics[name] <= high for name, (low, high) in intervals.items())


def test_calibration_errors() -> None:
    confidences = np.array([0.95, 0.95, 0.95, 0.95, 0.55, 0.55])
    correct = np.array([1, 1, 1, 0, 1, 0])
    # Two bins of equal width: |0.95 - 0.75| for four images, |0.55 - 0.5| for two.
    expected = (4 * 0.2 + 2 * 0.05) / 6
    assert calibration_error(equal_width_bins(confidences, correct)) == pytest.approx(expected)
    assert expected_calibration_error(confidences, correct) == pytest.approx(expected)
    # Three bins of two images each: (0.55: 1/2), (0.95: 1), (0.95: 1/2), in the order they came.
    adaptive = (2 * 0.05 + 2 * 0.05 + 2 * 0.45) / 6
    assert calibration_error(equal_mass_bins(confidences, correct, bins=3)) == pytest.approx(adaptive)
    assert [b.count for b in equal_mass_bins(confidences, correct, bins=4)] == [2, 2, 1, 1]
    assert calibration_error(equal_mass_bins(np.array([0.3]), np.array([1]))) == pytest.approx(0.7)


@pytest.mark.parametrize("true", [0.4, 1.0, 2.5])
def test_fit_temperature_recovers_the_true_temperature(true: float) -> None:
    """Labels are drawn from softmax(logits / T); the fit returns T and fixes the calibration."""
    logits = RNG.normal(size=(20_000, 8)) * 3
    probabilities = np.exp(logits / true)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    targets = (probabilities.cumsum(axis=1) > RNG.random((20_000, 1))).argmax(axis=1)
    result = fit_temperature(logits, targets)
    assert result == pytest.approx(true, rel=0.03)

    def error(temperature: float) -> float:
        scaled = np.exp(logits / temperature)
        scaled /= scaled.sum(axis=1, keepdims=True)
        return calibration_error(equal_width_bins(scaled.max(axis=1), scaled.argmax(axis=1) == targets))

    assert error(result) < 0.02
    assert true == 1.0 or error(1.0) > 3 * error(result)


@pytest.mark.parametrize(("count", "low", "high"), [(20, 0.9820, 0.99), (2000, 0.99, 0.9999)])
def test_prior_regularizes_the_temperature_of_few_images(count: int, low: float, high: float) -> None:
    targets = np.arange(count) % 2
    logits = np.where(np.eye(2)[targets] > 0, 2.0, -2.0)
    scaled = np.exp(logits / fit_temperature(logits, targets))
    confidence = (scaled.max(axis=1) / scaled.sum(axis=1)).mean()
    assert low < confidence < high


def test_bootstrap_intervals_cover() -> None:
    """Of 400 intervals of a mean of 80 draws with known mean, about 95% contain it."""
    draws = RNG.random((400, 80)) < 0.7
    result = [bootstrap_mean(row.astype(float), rounds=400, seed=i) for i, row in enumerate(draws)]
    covered = np.mean([low <= 0.7 <= high for low, high in result])
    assert 0.91 <= covered <= 0.98
    values = RNG.normal(size=300)
    (by_rows,) = bootstrap_statistics(lambda rows: np.array([values[rows].mean()]), 300, rounds=2000)
    np.testing.assert_allclose(by_rows, bootstrap_mean(values, rounds=2000, seed=5), atol=0.03)


def test_wilson_agrees_with_its_closed_form() -> None:
    z = 1.959963984540054
    for hits, n in ((0, 10), (7, 10), (10, 10), (81, 263), (9431, 10_000)):
        rate = hits / n
        center = (rate + z * z / (2 * n)) / (1 + z * z / n)
        half_width = z * np.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        np.testing.assert_allclose(
            wilson(rate, n), (max(0, center - half_width), min(1, center + half_width)), atol=1e-12
        )


def test_bootstraps_are_quantiles_of_draws_with_replacement() -> None:
    values = RNG.normal(size=300)
    draws = values[np.random.default_rng(3).integers(0, 300, (500, 300))]
    expected = np.quantile(draws.mean(axis=1), [0.025, 0.975])
    np.testing.assert_allclose(bootstrap_mean(values, rounds=500, seed=3), expected, atol=1e-12)

    def statistics(rows: np.ndarray) -> np.ndarray:
        return np.array([values[rows].mean(), values[rows].max()])

    mean, maximum = bootstrap_statistics(statistics, 300, rounds=500, seed=3)
    np.testing.assert_allclose(mean, expected, atol=1e-12)
    np.testing.assert_allclose(maximum, np.quantile(draws.max(axis=1), [0.025, 0.975]), atol=1e-12)
    assert bootstrap_mean(np.array([0.5])) == (0.5, 0.5)
    assert bootstrap_statistics(lambda rows: np.array([7.0, 8.0])[: len(rows) + 1], 1) == [(7.0, 7.0), (8.0, 8.0)]


def test_average_precision_by_definition() -> None:
    """The mean, over the images of the class, of the precision among all that score at least as high."""
    for scores in (RNG.normal(size=200), RNG.integers(0, 5, 200).astype(np.float32)):  # the second with ties
        targets = (RNG.random(200) < 0.3).astype(np.float32)
        precisions = [targets[scores >= score].mean(dtype=np.float64) for score in scores[targets > 0]]
        assert average_precision(scores, targets) == pytest.approx(np.mean(precisions), abs=1e-12)


def test_size_and_power_of_the_paired_test() -> None:
    """Under the null it rejects in at most 5% of cases; a real difference is detected."""
    num_rejected = 0
    for _ in range(400):
        base = RNG.random(300) < 0.8
        first, second = (np.where(RNG.random(300) < 0.1, RNG.random(300) < 0.8, base) for _ in range(2))
        num_rejected += compare_paired(first, second).p_value < 0.05
    assert num_rejected / 400 <= 0.07  # exact tests are conservative
    base = RNG.random(2000) < 0.8
    better = base | (RNG.random(2000) < 0.15)
    result = compare_paired(base, better)
    assert result.p_value < 1e-6
    assert result.verdict().startswith("This model is better (+")
    assert result.difference[0] > 0
    same = compare_paired(base, base)
    assert same.p_value == 1
    assert same.difference == (0, 0)
    assert "no significant difference" in same.verdict()
    assert result.only_first == 0
    assert result.only_second == int((better & ~base).sum())


def test_multi_label_metrics_agree_with_scikit_learn() -> None:
    logits, targets = RNG.normal(size=(80, 5)), RNG.integers(0, 2, (80, 5))
    targets[:, 4] = 0  # this label does not occur
    accumulated = MultiLabelMetrics()
    for row, target in zip(logits, targets, strict=True):
        accumulated.update(torch.from_numpy(row[None]), np.flatnonzero(target).tolist())
    metrics, intervals = accumulated.compute_with_intervals(5)
    expected = oracle.average_precision_score(targets[:, :4], logits[:, :4], average="macro")
    assert metrics["map"] == pytest.approx(expected)
    assert metrics["f1"] == pytest.approx(oracle.f1_score(targets, logits > 0, average="micro"))
    assert intervals["map"][0] < metrics["map"] < intervals["map"][1]
    classes = accumulated.class_rows(list("abcde"))
    assert [row["label"] for row in classes] == list("abcd")
    assert classes[1]["n"] == targets[:, 1].sum()
    assert classes[2]["ap"] == pytest.approx(oracle.average_precision_score(targets[:, 2], logits[:, 2]))
    row = accumulated.prediction_rows([str(i) for i in range(80)], list("abcde"))[7]
    assert row["true"] == "; ".join(n for n, t in zip("abcde", targets[7], strict=True) if t)


def test_intervals_of_few_images_are_wide() -> None:
    accumulated = ClassificationMetrics()
    accumulated.update(torch.eye(8) * 9, range(8))
    metrics, intervals = accumulated.compute_with_intervals(8)
    assert metrics["top1"] == 1.0
    assert intervals["top1"][0] < 0.7
    assert intervals["balanced_accuracy"][0] < 0.85
    assert intervals["ece"] == (0.0, 1.0) == intervals["ece_adaptive"]


@pytest.mark.parametrize(("classes", "each"), [(60, 1), (20, 3), (10, 30)])
def test_class_intervals_cover(classes: int, each: int) -> None:
    """Classes of known recall with few images: about 95% of the intervals contain the true mean."""
    rates, targets = np.linspace(0.4, 0.95, classes), np.repeat(np.arange(classes), each)
    covered = []
    for seed in range(150):
        correct = RNG.random(len(targets)) < rates[targets]
        predicted = np.where(correct, targets, (targets + RNG.integers(1, classes, len(targets))) % classes)
        low, high = class_intervals(targets, predicted, classes, rounds=100, seed=seed)["balanced_accuracy"]
        covered.append(low <= rates.mean() <= high)
    assert 0.88 <= np.mean(covered) <= 1.0, np.mean(covered)


def test_interval_of_the_calibration_error_can_reach_zero() -> None:
    """A perfectly calibrated model: its calibration error is due to chance."""
    confidence = RNG.uniform(0.5, 1.0, 800)
    targets = (RNG.random(800) > confidence).astype(int)  # class 0 is predicted, and is correct with that probability
    accumulated = ClassificationMetrics()
    accumulated.update(torch.from_numpy(np.log(np.stack([confidence, 1 - confidence], axis=1))), targets.tolist())
    metrics, intervals = accumulated.compute_with_intervals(2)
    assert intervals["ece"][0] < 0.5 * metrics["ece"]
    assert intervals["ece"][1] >= metrics["ece"]


def test_metrics_agree_with_scikit_learn() -> None:
    logits, targets = RNG.normal(size=(500, 12)) * 2, RNG.integers(12, size=500)
    metrics = ClassificationMetrics.from_arrays(logits, targets).compute()
    batched = ClassificationMetrics()
    for row, target in zip(torch.from_numpy(logits), targets.tolist(), strict=True):
        batched.update(row[None], [target])
    assert batched.compute() == pytest.approx(metrics)
    probabilities = torch.from_numpy(logits).softmax(-1).numpy()
    assert metrics["top1"] == pytest.approx(oracle.top_k_accuracy_score(targets, logits, k=1))
    assert metrics["top5"] == pytest.approx(oracle.top_k_accuracy_score(targets, logits, k=5))
    assert metrics["nll"] == pytest.approx(oracle.log_loss(targets, probabilities, labels=range(12)))


def test_expected_calibration_error_with_ten_bins() -> None:
    confidences, correct = np.array([0.95, 0.95, 0.55, 0.55, 1.0]), np.array([1, 0, 1, 1, 1])
    # (0.9, 1.0] holds 0.95, 0.95 and 1.0 with two of three correct; (0.5, 0.6] holds both 0.55.
    expected = (abs(2.9 - 2) + abs(1.1 - 2)) / 5
    assert expected_calibration_error(confidences, correct, bins=10) == pytest.approx(expected)
    assert expected_calibration_error(np.array([0.0]), np.array([0])) == 0


def test_class_tables() -> None:
    """Training and evaluation build their tables with the same functions."""
    rows = class_rows(np.array([0, 0, 1]), np.array([0, 2, 2]), ["a", "b", "c"])
    assert rows == [
        {"label": "a", "index": 0, "n": 2, "top1": 0.5, "f1": pytest.approx(2 / 3), "precision": 1.0},
        {"label": "b", "index": 1, "n": 1, "top1": 0.0, "f1": 0.0, "precision": None},
    ]
    logits, targets = np.array([[2.0, -1.0, 0.0], [-1.0, 3.0, 0.0]]), np.array([[1, 0, 0], [1, 1, 0]])
    table = multi_label_class_rows(logits, targets, ["a", "b", "c"])
    assert [(row["label"], row["n"], row["ap"]) for row in table] == [("a", 2, 1.0), ("b", 1, 1.0)]
