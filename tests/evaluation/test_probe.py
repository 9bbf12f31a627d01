"""Probes of frozen features, against published formulas, scikit-learn and on real images."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

import patchword as pw
from helpers.command import run
from helpers.model_zoo import RESNETS, VITS, make_checkpoint
from patchword.data.resolve import resolve_dataset
from patchword.errors import ConfigError, DataError
from patchword.evaluation import logistic_probe as logistic
from patchword.evaluation.frozen_features import cache_path, extract_features, read_layer
from patchword.evaluation.knn_probe import knn_accuracies, weighted_votes
from patchword.evaluation.logistic_probe import (
    PENALTIES,
    LogisticModel,
    fit_best_logistic,
    init_from_head,
    refit_logistic,
)
from patchword.evaluation.probe import probe
from patchword.evaluation.ridge_probe import RidgeProbe, sample_shots
from patchword.inference.classifier import Encoder
from patchword.inspection import capture


def make_clusters(count: int, width: int, classes: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Features around one center per class."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % classes
    centers = np.random.default_rng(99).normal(size=(classes, width)) * 1.5
    return torch.from_numpy((centers[y] + rng.normal(size=(count, width))).astype(np.float32)), torch.from_numpy(y)


def big_vision_few_shot(x: np.ndarray, y: np.ndarray, queries: np.ndarray, classes: int, l2: float) -> np.ndarray:
    """big_vision's few-shot evaluator: whiten, add a bias of 100, solve the normal equations."""
    mean, std = x.mean(axis=0), x.std(axis=0) + 1e-5
    train = np.hstack([(x - mean) / std, np.full((len(x), 1), 100.0)])
    test = np.hstack([(queries - mean) / std, np.full((len(queries), 1), 100.0)])
    targets = 2.0 * np.eye(classes)[y] - 1.0
    return test @ np.linalg.solve(train.T @ train + l2 * np.eye(train.shape[1]), train.T @ targets)


@pytest.mark.parametrize("count", [10, 60], ids=["fewer images than features", "more"])
@pytest.mark.parametrize("l2", [2.0**-5, 2.0**10, 2.0**19])
def test_few_shot_matches_big_vision(count: int, l2: float) -> None:
    (x, y), (queries, _) = make_clusters(count, 24), make_clusters(40, 24, seed=1)
    expected = big_vision_few_shot(x.double().numpy(), y.numpy(), queries.double().numpy(), 5, l2)
    np.testing.assert_allclose(RidgeProbe(x, y, 5).scores(queries, l2).numpy(), expected, rtol=1e-5, atol=1e-7)


def test_knn_matches_scikit_learn() -> None:
    (x, y), (queries, targets) = make_clusters(200, 16), make_clusters(50, 16, seed=1)
    sklearn_knn = KNeighborsClassifier(9, metric="cosine", weights=lambda d: np.exp((1 - d) / 0.07), algorithm="brute")
    similarities, indices = (torch.nn.functional.normalize(queries) @ torch.nn.functional.normalize(x).T).topk(9)
    found = weighted_votes(similarities, y[indices], 5).numpy()
    expected = sklearn_knn.fit(x.numpy(), y.numpy()).predict_proba(queries.numpy())
    np.testing.assert_allclose(found / found.sum(axis=1, keepdims=True), expected, atol=1e-4)
    accuracy = knn_accuracies(x, y, queries, targets, 5, [1, 9])
    assert accuracy[9] == pytest.approx((expected.argmax(axis=1) == targets.numpy()).mean())
    assert accuracy[1] == pytest.approx((y[indices[:, 0]] == targets).double().mean())


def test_logistic_regression_matches_scikit_learn() -> None:
    (x, y), (val, val_y) = make_clusters(300, 16), make_clusters(100, 16, seed=1)
    found = fit_best_logistic(x, y, val, val_y, 5)
    raw = x.double().numpy()
    scaled = (raw - raw.mean(axis=0)) / raw.std(axis=0, ddof=1)
    expected = LogisticRegression(C=1 / (2 * len(x) * found.penalty), tol=1e-8, max_iter=2000).fit(scaled, y.numpy())
    scaled_val = (val.double().numpy() - raw.mean(axis=0)) / raw.std(axis=0, ddof=1)
    probabilities = found.scores(val).softmax(dim=1).numpy()
    np.testing.assert_allclose(probabilities, expected.predict_proba(scaled_val), atol=5e-3)
    refitted = refit_logistic(x, y, 5, found.penalty)
    assert refitted.penalty == found.penalty
    assert torch.equal(refitted.weight, found.weight)
    losses = [
        float(torch.nn.functional.cross_entropy(refit_logistic(x, y, 5, p).scores(val), val_y)) for p in PENALTIES
    ]
    assert PENALTIES[int(np.argmin(losses))] == found.penalty, "chosen on the validation set"


@pytest.mark.slow
def test_few_shot_probe_is_initialized_from_the_pretrained_head() -> None:
    """Four images per class. The pretrained head has the same classes in another order and others, or is random."""

    def noisy_clusters(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = make_clusters(count, 64, seed=seed)
        return x + 5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)), y

    (x, y), (val, val_y), (many, many_y) = noisy_clusters(20, 0), noisy_clusters(400, 1), noisy_clusters(4000, 2)
    pretrained = refit_logistic(many, many_y, 5, 1e-3)
    others = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)).double() / 8
    head = LogisticModel(
        torch.cat([others, pretrained.weight.flip(1)], 1),
        torch.cat([torch.zeros(3).double() - 9, pretrained.bias.flip(0)]),
    )
    plain, found = fit_best_logistic(x, y, val, val_y, 5), fit_best_logistic(x, y, val, val_y, 5, head)

    def accuracy(probe: LogisticModel) -> float:
        return float((probe.scores(val).argmax(1) == val_y).double().mean())

    assert found.from_head
    assert accuracy(found) > accuracy(plain) + 0.1
    random_head = LogisticModel(
        torch.randn(64, 8, generator=torch.Generator().manual_seed(1)).double(), torch.zeros(8).double()
    )
    found = fit_best_logistic(x, y, val, val_y, 5, random_head)
    assert not found.from_head  # a random head does not help
    assert torch.equal(found.weight, plain.weight)


def test_penalty_search_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    (x, y), (val, val_y) = make_clusters(60, 16), make_clusters(200, 16, seed=1)
    x, val = (t + 3 * torch.randn(t.shape, generator=torch.Generator().manual_seed(0)) for t in (x, val))
    penalties: list[float] = []
    fit = logistic.fit_logistic
    monkeypatch.setattr(logistic, "fit_logistic", lambda *args: (penalties.append(args[-1]), fit(*args))[1])
    found = fit_best_logistic(x, y, val, val_y, 5)
    assert penalties == list(PENALTIES[: PENALTIES.index(found.penalty) + 2])
    assert len(penalties) < len(PENALTIES)
    for head in (None, LogisticModel(torch.eye(16, 8).double(), torch.zeros(8).double())):
        penalties.clear()
        found = fit_best_logistic(x, y, val, val_y, 5, head, seconds=0.0)
        assert penalties == [PENALTIES[0]]
        assert found.from_head == (head is not None)


def test_init_from_head_averages_the_predicted_classes() -> None:
    x, y = make_clusters(1300, 8)
    y[y == 4] = 3  # a class without images starts at zero
    head = LogisticModel(torch.randn(8, 7).double(), torch.randn(7).double())
    probabilities = head.scores(x).softmax(1)
    found = init_from_head(x, y, 5, head)
    for k in range(4):
        weights = probabilities[y == k].mean(0)
        torch.testing.assert_close(found.weight[:, k], head.weight @ weights)
        torch.testing.assert_close(found.bias[k], head.bias @ weights)
    assert not found.weight[:, 4].any()
    assert found.bias[4] == 0


def test_shots_are_of_every_class_and_depend_on_the_seed() -> None:
    targets = np.array([0] * 9 + [1] * 5 + [2] * 7)
    chosen = sample_shots(targets, 4, seed=1)
    assert np.bincount(targets[chosen]).tolist() == [4, 4, 4]
    assert len(set(chosen)) == 12
    assert not np.array_equal(chosen, sample_shots(targets, 4, seed=2))
    with pytest.raises(DataError, match=r"\bClass 1\b.*\b5\b.*\b6\b"):
        sample_shots(targets, 6, seed=0)


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two classes that differ in color, in a training and a test set; the cache is empty."""
    monkeypatch.setenv("PATCHWORD_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 6)):
        for name, color in (("red", (200, 40, 40)), ("blue", (40, 40, 200))):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = np.clip(np.array(color) + rng.integers(-40, 40, (32, 32, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return tmp_path / "photos"


def test_features_are_computed_once(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder(make_checkpoint(VITS["class"]))
    source = resolve_dataset(str(photos)).splits["train"]
    first = extract_features(encoder, source)
    image = encoder.preprocess.normalize(encoder.pixels(source.name(3))[None])
    with torch.inference_mode():
        torch.testing.assert_close(first[3:4], encoder.model.embed_images(image))
    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "map_images", lambda *_: pytest.fail("computed again"))
        assert torch.equal(extract_features(encoder, source), first)
    path = cache_path(encoder, source, None)
    assert path is not None
    path.write_bytes(path.read_bytes()[:-100])  # a damaged file is not used
    assert torch.equal(extract_features(encoder, source), first)
    Image.new("RGB", (32, 32), "green").save(source.name(3))  # neither is one of other images
    assert not torch.equal(extract_features(encoder, source)[3], first[3])
    assert cache_path(encoder, source, 0) != cache_path(encoder, source, 1)


def test_features_that_cannot_be_cached_are_still_computed(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("not a folder")
    monkeypatch.setenv("PATCHWORD_CACHE", str(tmp_path / "cache"))
    source = resolve_dataset(str(photos)).splits["train"]
    assert len(extract_features(Encoder(make_checkpoint(VITS["class"])), source)) == len(source)
    assert str(tmp_path / "cache") in capsys.readouterr().err


def test_unreadable_image_is_named(photos: Path) -> None:
    (photos / "train/red/4.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"red.4\.png"):
        probe(make_checkpoint(VITS["class"]), str(photos))


@pytest.mark.parametrize("name", VITS)
def test_layers(name: str) -> None:
    model = make_checkpoint(VITS[name]).build_model()
    images = torch.randn(2, model.config.in_channels, *model.config.image_size)
    with torch.no_grad():
        tokens = capture.features(model, images, [1])["blocks.1"]
        mean = tokens[:, model.config.num_prefix :].mean(dim=1)
        both = torch.cat([tokens[:, 0], mean], dim=1)
        expected = {"class": tokens[:, 0], "class+average": both}.get(model.config.pooling, mean)
        torch.testing.assert_close(read_layer(model, 1, images), expected)
        torch.testing.assert_close(read_layer(model, None, images), model.embed_images(images))


def test_resnet_has_no_layers(photos: Path) -> None:
    model = make_checkpoint(next(iter(RESNETS.values())))
    assert probe(model, str(photos), shots=(5,)).logistic == 1.0
    with pytest.raises(ConfigError, match="--layer .*ViT"):
        probe(model, str(photos), layer=0)


def test_colors_are_separable_without_training(photos: Path) -> None:
    found = probe(make_checkpoint(VITS["average"]), str(photos), shots=(1, 5, 50), seeds=3)
    assert set(found.few_shot) == {1, 5}
    assert found.skipped_shots == (50,)  # no class has 50 images
    assert found.train == 24
    assert found.test == 12
    assert found.classes == 2
    assert np.mean(found.few_shot[5]) >= 0.9
    assert found.logistic == 1.0
    assert found.knn[1] == 1.0


@pytest.mark.slow
def test_probe_command_on_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHWORD_CACHE", str(tmp_path))
    result = run("probe", "patchword:cifar10", "digits", "--shots", 1, 10, "--seeds", 3, "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    one, ten = (np.mean(found["few_shot"][n]) for n in ("1", "10"))
    assert 0.3 < one < ten < found["logistic"]
    assert found["logistic"] > 0.9
    # On a slow machine there are lines of progress, and nothing else.
    assert [line for line in result.stderr.splitlines() if not line.startswith("encoding: ")] == []


@pytest.mark.slow
def test_invalid_requests() -> None:
    assert run("probe", "patchword:cifar10", "digits", "--shots", 0).returncode == 2
    with pytest.raises(ConfigError, match=r"\bseeds\b.* 0 "):
        pw.probe("patchword:cifar10", "digits", seeds=0)
