"""The wheel and the sdist: complete, without files of a work tree, and usable in a fresh environment without extras.

They are built from copies of the repository. Nothing is downloaded: the fresh environments link to the dependencies of
the environment that runs the tests.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import Distribution, distribution, packages_distributions
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image

import patchword
from patchword.data.datasets.catalog import class_names

ROOT = Path(__file__).parents[2]
TIMEOUT = 300
# What a work tree may contain besides the repository.
DECOYS = (
    *("runs/digits/report.html", "site/index.html", ".venv/lib/module.py", "dist/patchword-0.0.1.tar.gz"),
    *("build/lib/patchword/removed.py", ".pytest_cache/README.md", ".hypothesis/examples/1", "notes.txt"),
    *("examples/runs/digits/config.json", "examples/.ipynb_checkpoints/tour.ipynb"),
    *("src/patchword/__pycache__/errors.cpython-311.pyc", "docs/__pycache__/x.cpython-311.pyc", "docs/.DS_Store"),
)
MISSING_EXTRAS = {
    "serve": ("serve", ("serve", "patchword:cifar10")),
    "engine": ("export", ("predict", "patchword:cifar10", "image.png", "--engine", "onnx")),
    "export": ("export", ("export", "patchword:cifar10", "model.onnx")),
    "HEIC": ("heic", ("inspect", "patchword:cifar10", "photo.heic", "--out", "seen")),
    "parquet": ("data", ("evaluate", "patchword:cifar10", "rows.parquet")),
    "features": ("data", ("embed", "patchword:cifar10", "image.png", "--out", "features.parquet")),
    "hub dataset": ("data", ("evaluate", "patchword:cifar10", "hf-datasets:owner/name")),
    "logger": ("log", ("train", "quickstart", "--loggers", "tensorboard")),
}
# Runs command lines in one process, because importing torch takes seconds: JSON in, exit codes and messages out.
COMMANDS_SCRIPT = """
import contextlib, io, json, sys
from patchword.cli.main import main
results = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
        try:
            main(words)
        except SystemExit as stop:
            results.append((stop.code, errors.getvalue()))
print(json.dumps(results))
"""
# `patchword quickstart` with 2 epochs instead of 40: the same code, data and report, but a poor model.
QUICKSTART_SCRIPT = """
from patchword.cli.main import main
from patchword.recipes import quickstart
quickstart.config = quickstart.config.replace(epochs=2)
main(["quickstart"])
"""
pytestmark = pytest.mark.slow
if not (ROOT / ".git").exists():
    pytest.skip("needs a clone: this tree has no .git", allow_module_level=True)


class Built(NamedTuple):
    """The files of the repository and what was built from them."""

    files: set[str]
    tracked: set[str]
    clone: Path
    sdist: Path
    wheel: Path
    wheel_of_clone: Path


class Installation(NamedTuple):
    """A fresh environment, and the distributions that are linked into it."""

    folder: Path
    linked: dict[str, Distribution]


Run = Callable[..., subprocess.CompletedProcess[str]]


def run_checked(command: Sequence[str | Path], folder: Path) -> str:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT)
    assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
    return result.stdout


def list_files(*options: str) -> set[str]:
    """List what git knows, relative to the repository."""
    names = run_checked(["git", "ls-files", "-z", *options], ROOT).split("\0")
    return {name for name in names if (ROOT / name).is_file()}


def copy_files(names: Iterable[str], target: Path) -> Path:
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)
    return target


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build sdist and wheel as a release does, from a used work tree, and a wheel directly from a clean clone."""
    files = list_files("--cached", "--others", "--exclude-standard")
    work_tree = copy_files(files, tmp_path_factory.mktemp("work_tree"))
    clone = copy_files(files, tmp_path_factory.mktemp("clone"))
    for name in DECOYS:
        (work_tree / name).parent.mkdir(parents=True, exist_ok=True)
        (work_tree / name).touch()
    out, direct = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("direct")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir"]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run_checked, ([*build, out], [*build, direct, "--wheel"]), (work_tree, clone)))
    (sdist,), (wheel,), (wheel_of_clone,) = out.glob("*.tar.gz"), out.glob("*.whl"), direct.glob("*.whl")
    return Built(files, list_files(), clone, sdist, wheel, wheel_of_clone)


def read_metadata(wheel: Path) -> Metadata:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Metadata.from_email(archive.read(name), validate=True)


def base_distributions(requirements: Iterable[Requirement]) -> dict[str, Distribution]:
    """Find the installed distributions that requirements without extras need, directly or not."""
    found: dict[str, Distribution] = {}
    pending = [(requirement, frozenset({""})) for requirement in requirements]
    seen = set()
    while pending:
        requirement, extras = pending.pop()
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        key = (canonicalize_name(requirement.name), frozenset({"", *requirement.extras}))
        if key not in seen:
            seen.add(key)
            found[key[0]] = distribution(key[0])
            pending += [(Requirement(text), key[1]) for text in found[key[0]].requires or ()]
    return found


def link_distribution(dist: Distribution, target: Path) -> None:
    """Link the top-level files and folders of a distribution into another environment."""
    for name in {file.parts[0] for file in dist.files or ()} - {"..", "__pycache__"}:
        source, link = Path(str(dist.locate_file(name))), target / name
        if source.exists() and not link.exists():
            link.symlink_to(source)


def install(source: Path, wheel: Path, folder: Path) -> Installation:
    """Install a wheel or a folder in a fresh environment, without extras."""
    run_checked([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
    (site,) = folder.glob("lib/python*/site-packages")
    linked = base_distributions(read_metadata(wheel).requires_dist or [])
    for dist in (*linked.values(), *([distribution("setuptools")] if source.is_dir() else [])):
        link_distribution(dist, site)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "--disable-pip-version-check"]
    run_checked([*pip, "install", "--no-deps", "--no-index", "--no-build-isolation", source], folder.parent)
    return Installation(folder, linked)


@pytest.fixture(scope="session")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return install(built.wheel, built.wheel, tmp_path_factory.mktemp("user") / "env")


@pytest.fixture(scope="session")
def installed_from_clone(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return install(built.clone, built.wheel, tmp_path_factory.mktemp("developer") / "env")


def make_runner(installation: Installation, folder: Path) -> Run:
    """Make a function that runs a program of the environment in a folder with two images."""
    Image.effect_noise((48, 40), 60).convert("RGB").save(folder / "image.png")
    (folder / "rows.parquet").write_bytes(b"PAR1")
    shutil.copy(ROOT / "tests/fixtures/heic/photo.heic", folder)
    home = str(installation.folder.parent)  # kept between commands: matplotlib caches its list of fonts
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "PATCHWORD", "HF_", "XDG_"))}

    def run(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**kept, "HOME": home, "HF_HUB_OFFLINE": "1", **variables}
        command = [str(installation.folder / "bin" / program), *arguments]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT)

    return run


@pytest.fixture
def user(installed: Installation, tmp_path: Path) -> Run:
    return make_runner(installed, tmp_path)


def wheel_content(wheel: Path) -> dict[str, int]:
    """Return the checksum of each file."""
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.CRC for info in archive.infolist()}


def test_wheel_holds_every_file_of_the_package_and_nothing_else(built: Built) -> None:
    expected = {name.removeprefix("src/") for name in built.files if name.startswith("src/patchword/")}
    packaged = {name for name in wheel_content(built.wheel) if ".dist-info/" not in name}
    assert packaged == expected
    assert {"patchword/py.typed", "patchword/weights/cifar10/model.safetensors"} <= packaged


def test_wheel_built_from_the_sdist_equals_the_wheel_built_from_the_clone(built: Built) -> None:
    assert wheel_content(built.wheel) == wheel_content(built.wheel_of_clone)


def test_sdist_is_the_repository(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    generated = {name for name in names if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    assert names - generated - built.files == set(), "files of a work tree: exclude them in MANIFEST.in"
    expected = {name for name in built.files if "/" in name or name in built.tracked}  # notes at the top are fine
    assert expected - names == set(), "not in the sdist: add them to MANIFEST.in"


def test_metadata(built: Built) -> None:
    metadata = read_metadata(built.wheel)
    assert str(metadata.version) == patchword.__version__
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.license_files == ["LICENSE"]
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (built.clone / "README.md").read_text(encoding="utf-8")


def test_environment_has_the_base_dependencies_only(installed: Installation) -> None:
    allowed = {*installed.linked, "patchword"}
    owners = {name: {*map(canonicalize_name, names)} for name, names in packages_distributions().items()}
    modules = [name for name in owners if name.isidentifier() and not owners[name] <= allowed]
    modules = sorted({*modules} - sys.stdlib_module_names - {"test"})  # joeynmt installs one, too
    assert {"fastapi", "onnxruntime", "pyarrow", "datasets", "tensorboard", "pytest"} <= {*modules}
    code = f"from importlib.util import find_spec; print([name for name in {modules!r} if find_spec(name)])"
    assert run_checked([installed.folder / "bin/python", "-I", "-c", code], installed.folder) == "[]\n"


def test_predict(user: Run) -> None:
    assert user("patchword", "--version").stdout.strip() == patchword.__version__
    result = user("patchword", "predict", "patchword:cifar10", "image.png", "--top", "10", "--json")
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(result.stdout)
    assert {score["label"] for score in row["predictions"]} == {*class_names("cifar10")}
    assert sum(score["probability"] for score in row["predictions"]) == pytest.approx(1)


def test_models(user: Run) -> None:
    result = user("patchword", "models", "--json")
    assert result.returncode == 0, result.stderr
    assert len(json.loads(result.stdout)["hub"]) >= 40


def test_inspect(user: Run, tmp_path: Path) -> None:
    result = user("patchword", "inspect", "patchword:cifar10", "image.png", "--out", "seen")
    assert result.returncode == 0, result.stderr
    assert list((tmp_path / "seen").glob("*.html"))


def test_quickstart(user: Run, tmp_path: Path) -> None:
    result = user("python", "-c", QUICKSTART_SCRIPT)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "runs/digits/report.html").is_file()
    assert (tmp_path / "runs/digits/model.safetensors").is_file()


@pytest.fixture(scope="session")
def missing_extras(installed: Installation, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Run every command that needs an extra; exit code and message of each."""
    run = make_runner(installed, tmp_path_factory.mktemp("extras"))
    result = run("python", "-c", COMMANDS_SCRIPT, json.dumps([words for _, words in MISSING_EXTRAS.values()]))
    assert result.returncode == 0, result.stderr
    return dict(zip(MISSING_EXTRAS, map(tuple, json.loads(result.stdout)), strict=True))


@pytest.mark.parametrize("feature", MISSING_EXTRAS)
def test_missing_extra_is_reported_with_its_install_line(
    feature: str, missing_extras: dict[str, tuple[int, str]], built: Built
) -> None:
    extra, (code, message) = MISSING_EXTRAS[feature][0], missing_extras[feature]
    assert code == 2
    assert re.findall(r"patchword\[.*?\]", message) == [f"patchword[{extra}]"], message
    assert f"pip install 'patchword[{extra}]'" in " ".join(message.split())
    assert "constraints.txt" not in message, "a wheel has no constraints.txt"
    packages = {
        requirement.name
        for requirement in read_metadata(built.wheel).requires_dist or []
        if requirement.marker and requirement.marker.evaluate({"extra": extra})
        if not requirement.marker.evaluate({"extra": ""})
    }
    assert any(re.search(rf"\b{name}\b", message) for name in packages), f"{extra} does not install what is missing"


@pytest.mark.parametrize("source", ["installed from the folder", "run from the folder"])
def test_clone_reports_a_missing_extra_with_the_install_line_of_a_clone(
    source: str, built: Built, installed: Installation, installed_from_clone: Installation, tmp_path: Path
) -> None:
    is_installed = source == "installed from the folder"
    run = make_runner(installed_from_clone if is_installed else installed, tmp_path)
    variables = {} if is_installed else {"PYTHONPATH": str(built.clone / "src")}  # as an editable installation
    result = run("python", "-m", "patchword", "serve", "patchword:cifar10", **variables)
    assert result.returncode == 2, result.stderr
    assert "pip install -c constraints.txt '.[serve]'" in " ".join(result.stderr.split())
    assert "patchword[" not in result.stderr
