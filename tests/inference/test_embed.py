"""Image embeddings: chunks, and the files that they are written to."""

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import patchword as pw
from helpers.color_classifier import write_color_folder
from helpers.model_zoo import RESNETS, VITS, make_checkpoint
from helpers.small_checkpoint import make_checkpoint as small_checkpoint
from patchword.core import io
from patchword.errors import ConfigError, DataError, OutputError
from patchword.inference import embed as embed_module
from patchword.inference.classifier import Classifier, Encoder
from patchword.inference.embed import EmbeddingChunk, embed, embed_images, feature_dim
from patchword.inference.feature_files import check_feature_file, open_feature_file
from patchword.inference.inputs import resolve_images

HEADLESS = small_checkpoint(labels=None, num_classes=0)
FEATURES = np.array([[1 / 3, -2.5e-8, 3e30], [0.0, -1.0, 7.25]], dtype=np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_color_folder(tmp_path / "data")


def rows(chunks: list[EmbeddingChunk]) -> np.ndarray:
    return np.concatenate([chunk.features for chunk in chunks])


def test_features_are_the_output_of_a_model_without_a_head(folder: Path) -> None:
    chunks = list(embed(HEADLESS, folder, chunk_size=4))
    images = resolve_images([folder])
    names = [name for chunk in chunks for name in chunk.names]
    assert names == [image.name for image in images if "broken" not in image.name]
    assert [name for chunk in chunks for name, _ in chunk.unreadable] == [str(folder / "green/broken.jpg")]
    assert [len(chunk.names) + len(chunk.unreadable) for chunk in chunks] == [4, 4, 4, 2]
    encoder, model = Encoder(HEADLESS), HEADLESS.build_model()
    pixels = torch.stack([encoder.pixels(name) for name in names])
    with torch.inference_mode():
        expected = model(encoder.preprocess.normalize(pixels)).numpy()
    assert rows(chunks).dtype == np.float32
    np.testing.assert_allclose(rows(chunks), expected, rtol=1e-4, atol=1e-5)


def test_features_do_not_depend_on_the_head(folder: Path) -> None:
    checkpoint = small_checkpoint()
    with_head, without = (rows(list(embed(c, folder))) for c in (checkpoint, checkpoint.adapt(num_classes=0)))
    np.testing.assert_array_equal(with_head, without)
    np.testing.assert_array_equal(rows(list(pw.embed(Classifier(checkpoint), folder))), with_head)


@pytest.mark.parametrize("name", [*VITS, *RESNETS])
def test_width_of_every_kind_of_model(name: str) -> None:
    checkpoint = make_checkpoint({**VITS, **RESNETS}[name])
    (chunk,) = embed(checkpoint, Image.new("RGB", (40, 40), "orange"))
    assert chunk.features.shape == (1, feature_dim(checkpoint.config))


def test_inputs(folder: Path) -> None:
    array = np.zeros((3, 32, 32, 3), dtype=np.uint8)
    path = folder / "red/0.png"
    for images in (path, str(path), path.read_bytes(), array[0], Image.open(path), [path]):
        assert rows(list(embed(HEADLESS, images))).shape == (1, 48)
    assert rows(list(embed(HEADLESS, array))).shape == (3, 48)
    with pytest.raises(DataError, match="No images"):
        embed(HEADLESS, [])
    with pytest.raises(ConfigError, match="chunk_size"):
        embed(HEADLESS, path, chunk_size=0)
    with pytest.raises(ConfigError, match="Checkpoint"):
        embed(torch.nn.Identity(), path)  # type: ignore[arg-type]


def test_images_are_read_as_chunks_are_consumed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any iterator of images will do: it is not listed first."""
    image, taken = resolve_images([folder / "red/0.png"])[0], []

    def endless() -> object:
        while True:
            taken.append(image)
            yield image

    monkeypatch.setattr(embed_module, "resolve_images", None)
    seen: list[None] = []
    first = next(embed_images(Encoder(HEADLESS), endless(), 5, lambda: seen.append(None)))  # type: ignore[arg-type]
    assert len(first.names) == 5 <= len(seen)
    assert len(taken) < 500


def read_npz(path: Path) -> tuple[list[str], np.ndarray]:
    with np.load(path) as arrays:  # allow_pickle is False
        assert arrays["features"].dtype == np.float32
        return arrays["paths"].tolist(), arrays["features"]


def read_parquet(path: Path) -> tuple[list[str], np.ndarray]:
    table = pq.read_table(path)
    features = np.array(table["features"].to_pylist(), dtype=np.float32).reshape(len(table), 3)
    return table["path"].to_pylist(), features


def read_csv(path: Path) -> tuple[list[str], np.ndarray]:
    with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        header, *lines = csv.reader(file)
    assert header == ["path", "feature_0", "feature_1", "feature_2"]
    return [line[0] for line in lines], np.array([line[1:] for line in lines], dtype=np.float32).reshape(-1, 3)


READERS: dict[str, Callable[[Path], tuple[list[str], np.ndarray]]] = {
    ".npz": read_npz,
    ".parquet": read_parquet,
    ".csv": read_csv,
}


@pytest.mark.parametrize("suffix", READERS)
def test_files_hold_every_chunk_exactly(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"new/features{suffix}"
    with open_feature_file(path, 3) as append:
        append(EmbeddingChunk(("a, b.png", "한.png"), FEATURES))
        append(EmbeddingChunk((), np.zeros((0, 3), np.float32)))
        append(EmbeddingChunk(("odd\udcff.png",), FEATURES[1:]))
    paths, features = READERS[suffix](path)
    assert paths[:2] == ["a, b.png", "한.png"]
    assert paths[2] == ("odd\\udcff.png" if suffix == ".parquet" else "odd\udcff.png")  # Parquet stores UTF-8 only
    np.testing.assert_array_equal(features, np.concatenate([FEATURES, FEATURES[1:]]))
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", READERS)
def test_file_without_rows(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"features{suffix}"
    with open_feature_file(path, 3):
        pass
    paths, features = READERS[suffix](path)
    assert (paths, features.shape) == ([], (0, 3))


@pytest.mark.parametrize("suffix", READERS)
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_old_file_survives_a_failure(suffix: str, failure: BaseException, tmp_path: Path) -> None:
    path = tmp_path / f"features{suffix}"
    path.write_text("old")
    expected = OutputError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected), open_feature_file(path, 3) as append:
        append(EmbeddingChunk(("a", "b"), FEATURES))
        raise failure
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_failure_at_the_end_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(io, "sync", fail)
    with pytest.raises(OutputError, match="No space left"), open_feature_file(tmp_path / "a.npz", 3) as append:
        append(EmbeddingChunk(("a", "b"), FEATURES))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["features", "features.npy", "features.NPZ.gz"])
def test_unknown_suffix_lists_the_valid_ones(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_feature_file(Path(name))
    assert all(suffix in str(error.value) for suffix in READERS)
