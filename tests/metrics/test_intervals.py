"""Figures of merit against scikit-learn, hand-made cases, and simulations."""

import numpy as np
import pytest
import torch
from sklearn import metrics as oracle

from patchword.metrics.calibration import calibration_error, equal_mass, equal_width, fit_temperature
from patchword.metrics.classification import ClassificationMetrics, average_precision, expected_calibration_error
from patchword.metrics.intervals import bootstrap_all, bootstrap_mean, compare, wilson
from patchword.metrics.multilabel import MultiLabelMetrics
from patchword.metrics.per_class import class_intervals, confusion_matrix, per_class_metrics

NOISE = np.random.default_rng(0)


def test_class_figures_are_scikit_learns() -> None:
    targets, predicted = NOISE.integers(0, 6, 500), NOISE.integers(0, 5, 500)  # class 5 is never said
    figures = per_class_metrics(targets, predicted, 6)
    expected = oracle.precision_recall_fscore_support(targets, predicted, labels=range(6), zero_division=np.nan)
    np.testing.assert_allclose(figures.precision, expected[0])
    np.testing.assert_allclose(figures.recall, expected[1])
    np.testing.assert_allclose(figures.f1, np.nan_to_num(expected[2]))
    np.testing.assert_array_equal(figures.support, expected[3])
    assert figures.balanced_accuracy == pytest.approx(oracle.balanced_accuracy_score(targets, predicted))
    assert figures.macro_f1 == pytest.approx(oracle.f1_score(targets, predicted, average="macro"))
    matrix = confusion_matrix(targets, predicted, 6)
    assert matrix.shape == (6, 6)
    assert matrix[2, 3] == ((targets == 2) & (predicted == 3)).sum()
    np.testing.assert_array_equal(matrix.sum(axis=0), np.bincount(predicted, minlength=6))


def test_a_class_that_does_not_occur_does_not_count() -> None:
    figures = per_class_metrics(np.array([0, 0, 1]), np.array([0, 1, 1]), 3)
    assert figures.balanced_accuracy == pytest.approx(0.75)
    assert np.isnan(figures.recall[2])
    assert figures.macro_f1 == pytest.approx((2 / 3 + 2 / 3) / 2)


def test_brier_is_scikit_learns_for_two_classes() -> None:
    share, targets = NOISE.random(200), NOISE.integers(0, 2, 200)
    tally = ClassificationMetrics()
    tally.add(torch.from_numpy(np.log(np.stack([1 - share, share], axis=1))), targets.tolist())
    figures, intervals = tally.detailed(2)
    assert figures["brier"] == pytest.approx(2 * oracle.brier_score_loss(targets, share))
    assert figures["nll"] == pytest.approx(oracle.log_loss(targets, share))
    assert all(low <= figures[name] <= high for name, (low, high) in intervals.items())


def test_calibration_errors_by_hand() -> None:
    confidences = np.array([0.95, 0.95, 0.95, 0.95, 0.55, 0.55])
    right = np.array([1, 1, 1, 0, 1, 0])
    # Two bins of width: |0.95 - 0.75| for four pictures, |0.55 - 0.5| for two.
    expected = (4 * 0.2 + 2 * 0.05) / 6
    assert calibration_error(equal_width(confidences, right)) == pytest.approx(expected)
    assert expected_calibration_error(confidences, right) == pytest.approx(expected)
    # Three bins of two pictures each: (0.55: 1/2), (0.95: 1), (0.95: 1/2), in the order they came.
    adaptive = (2 * 0.05 + 2 * 0.05 + 2 * 0.45) / 6
    assert calibration_error(equal_mass(confidences, right, bins=3)) == pytest.approx(adaptive)
    assert [b.count for b in equal_mass(confidences, right, bins=4)] == [2, 2, 1, 1]
    assert calibration_error(equal_mass(np.array([0.3]), np.array([1]))) == pytest.approx(0.7)


@pytest.mark.parametrize("true", [0.4, 1.0, 2.5])
def test_a_temperature_is_found_again(true: float) -> None:
    """Labels drawn from softmax(logits / T): T is what is found, and calibration is mended by it."""
    logits = NOISE.normal(size=(20_000, 8)) * 3
    shares = np.exp(logits / true)
    shares /= shares.sum(axis=1, keepdims=True)
    targets = (shares.cumsum(axis=1) > NOISE.random((20_000, 1))).argmax(axis=1)
    found = fit_temperature(logits, targets)
    assert found == pytest.approx(true, rel=0.03)

    def error(temperature: float) -> float:
        scaled = np.exp(logits / temperature)
        scaled /= scaled.sum(axis=1, keepdims=True)
        return calibration_error(equal_width(scaled.max(axis=1), scaled.argmax(axis=1) == targets))

    assert error(found) < 0.02
    assert true == 1.0 or error(1.0) > 3 * error(found)


@pytest.mark.parametrize(("count", "least", "most"), [(20, 0.9820, 0.99), (2000, 0.99, 0.9999)])
def test_pictures_that_are_all_right_do_not_prove_that_the_model_is_never_wrong(
    count: int, least: float, most: float
) -> None:
    targets = np.arange(count) % 2
    logits = np.where(np.eye(2)[targets] > 0, 2.0, -2.0)
    scaled = np.exp(logits / fit_temperature(logits, targets))
    confidence = (scaled.max(axis=1) / scaled.sum(axis=1)).mean()
    assert least < confidence < most


def test_bootstrap_intervals_cover() -> None:
    """Of 400 intervals of a mean of 80 draws with known mean, about 95 in 100 hold it."""
    draws = NOISE.random((400, 80)) < 0.7
    found = [bootstrap_mean(row.astype(float), rounds=400, seed=i) for i, row in enumerate(draws)]
    covered = np.mean([low <= 0.7 <= high for low, high in found])
    assert 0.91 <= covered <= 0.98
    values = NOISE.normal(size=300)
    (by_rows,) = bootstrap_all(lambda rows: np.array([values[rows].mean()]), 300, rounds=2000)
    np.testing.assert_allclose(by_rows, bootstrap_mean(values, rounds=2000, seed=5), atol=0.03)


def test_wilson_is_its_closed_form() -> None:
    z = 1.959963984540054
    for hits, n in ((0, 10), (7, 10), (10, 10), (81, 263), (9431, 10_000)):
        rate = hits / n
        centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
        reach = z * np.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        np.testing.assert_allclose(wilson(rate, n), (max(0, centre - reach), min(1, centre + reach)), atol=1e-12)


def test_bootstraps_are_quantiles_of_draws_with_replacement() -> None:
    values = NOISE.normal(size=300)
    draws = values[np.random.default_rng(3).integers(0, 300, (500, 300))]
    expected = np.quantile(draws.mean(axis=1), [0.025, 0.975])
    np.testing.assert_allclose(bootstrap_mean(values, rounds=500, seed=3), expected, atol=1e-12)

    def statistics(rows: np.ndarray) -> np.ndarray:
        return np.array([values[rows].mean(), values[rows].max()])

    mean, most = bootstrap_all(statistics, 300, rounds=500, seed=3)
    np.testing.assert_allclose(mean, expected, atol=1e-12)
    np.testing.assert_allclose(most, np.quantile(draws.max(axis=1), [0.025, 0.975]), atol=1e-12)
    assert bootstrap_mean(np.array([0.5])) == (0.5, 0.5)
    assert bootstrap_all(lambda rows: np.array([7.0, 8.0])[: len(rows) + 1], 1) == [(7.0, 7.0), (8.0, 8.0)]


def test_average_precision_by_definition() -> None:
    """The mean, over the images of the class, of the precision among all that score at least as high."""
    for scores in (NOISE.normal(size=200), NOISE.integers(0, 5, 200).astype(np.float32)):  # the second with ties
        targets = (NOISE.random(200) < 0.3).astype(np.float32)
        precisions = [targets[scores >= score].mean(dtype=np.float64) for score in scores[targets > 0]]
        assert average_precision(scores, targets) == pytest.approx(np.mean(precisions), abs=1e-12)


def test_the_paired_test_has_the_right_size_and_power() -> None:
    """Under the null it errs in at most 5 of 100 cases; a real difference is found."""
    wrong = 0
    for _ in range(400):
        base = NOISE.random(300) < 0.8
        first, second = (np.where(NOISE.random(300) < 0.1, NOISE.random(300) < 0.8, base) for _ in range(2))
        wrong += compare(first, second).p_value < 0.05
    assert wrong / 400 <= 0.07  # exact tests err less than they may
    base = NOISE.random(2000) < 0.8
    better = base | (NOISE.random(2000) < 0.15)
    found = compare(base, better)
    assert found.p_value < 1e-6
    assert found.verdict().startswith("This model is better (+")
    assert found.difference[0] > 0
    same = compare(base, base)
    assert same.p_value == 1
    assert same.difference == (0, 0)
    assert "no significant difference" in same.verdict()
    assert found.only_first == 0
    assert found.only_second == int((better & ~base).sum())


def test_several_labels_are_scikit_learns() -> None:
    logits, targets = NOISE.normal(size=(80, 5)), NOISE.integers(0, 2, (80, 5))
    targets[:, 4] = 0  # a label that does not occur
    tally = MultiLabelMetrics()
    for row, truth in zip(logits, targets, strict=True):
        tally.add(torch.from_numpy(row[None]), np.flatnonzero(truth).tolist())
    figures, intervals = tally.detailed(5)
    expected = oracle.average_precision_score(targets[:, :4], logits[:, :4], average="macro")
    assert figures["map"] == pytest.approx(expected)
    assert figures["f1"] == pytest.approx(oracle.f1_score(targets, logits > 0, average="micro"))
    assert intervals["map"][0] < figures["map"] < intervals["map"][1]
    classes = tally.per_class(list("abcde"))
    assert [each["label"] for each in classes] == list("abcd")
    assert classes[1]["n"] == targets[:, 1].sum()
    assert classes[2]["ap"] == pytest.approx(oracle.average_precision_score(targets[:, 2], logits[:, 2]))
    row = tally.rows([str(i) for i in range(80)], list("abcde"))[7]
    assert row["true"] == "; ".join(n for n, t in zip("abcde", targets[7], strict=True) if t)


def test_few_pictures_leave_doubt() -> None:
    tally = ClassificationMetrics()
    tally.add(torch.eye(8) * 9, range(8))
    figures, intervals = tally.detailed(8)
    assert figures["top1"] == 1.0 and intervals["top1"][0] < 0.7, "eight of eight is not certainty"
    assert intervals["balanced_accuracy"][0] < 0.85
    assert intervals["ece"] == (0.0, 1.0) == intervals["ece_adaptive"]


@pytest.mark.parametrize(("classes", "each"), [(60, 1), (20, 3), (10, 30)])
def test_intervals_of_classes_cover(classes: int, each: int) -> None:
    """Classes of known rates, seen in few pictures: about 95 of 100 intervals hold the true mean."""
    rates, targets = np.linspace(0.4, 0.95, classes), np.repeat(np.arange(classes), each)
    covered = []
    for seed in range(150):
        right = NOISE.random(len(targets)) < rates[targets]
        predicted = np.where(right, targets, (targets + NOISE.integers(1, classes, len(targets))) % classes)
        low, high = class_intervals(targets, predicted, classes, rounds=100, seed=seed)["balanced_accuracy"]
        covered.append(low <= rates.mean() <= high)
    assert 0.88 <= np.mean(covered) <= 1.0, np.mean(covered)


def test_the_interval_of_a_calibration_error_reaches_down_to_none() -> None:
    """Pictures that are right just as often as they say: no calibration error but by chance."""
    sure = NOISE.uniform(0.5, 1.0, 800)
    targets = (NOISE.random(800) > sure).astype(int)  # class 0 is said, and is right with that probability
    tally = ClassificationMetrics()
    tally.add(torch.from_numpy(np.log(np.stack([sure, 1 - sure], axis=1))), targets.tolist())
    figures, intervals = tally.detailed(2)
    assert intervals["ece"][0] < 0.5 * figures["ece"]
    assert intervals["ece"][1] >= figures["ece"]
