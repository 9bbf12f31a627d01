"""The examples run: notebooks in a kernel of this Python, scripts in processes of their own, all on tiny data."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import onnxruntime
import pytest
from PIL import Image

from helpers.small_checkpoint import make_checkpoint
from patchword.checkpoints import write_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
EXECUTE = Path(__file__).with_name("execute_notebook.py")
TIMEOUT = 300  # seconds


def file_name(path: Path) -> str:
    return path.name


class ExecutedNotebook:
    """A notebook that was run from its first to its last cell."""

    def __init__(self, name: str, folder: Path, **parameters: object) -> None:
        """Run it in `folder`, with other values for some of its parameters."""
        out = folder / "executed.ipynb"
        command = [sys.executable, EXECUTE, EXAMPLES / name, out, json.dumps(parameters)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT)
        assert done.returncode == 0, done.stderr
        notebook = nbformat.read(out, as_version=4)
        self.cells = {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}
        assert self.text("injected-parameters").strip() == sys.executable  # the kernel is this Python

    def text(self, cell: str) -> str:
        """What a cell printed."""
        return "".join(output.text for output in self.cells[cell].outputs if output.output_type == "stream")

    def num_images(self, cell: str) -> int:
        """How many figures and images a cell shows."""
        return sum("image/png" in output.get("data", {}) for output in self.cells[cell].outputs)

    def warnings(self) -> list[str]:
        """What was printed to standard error."""
        outputs = [output for cell in self.cells.values() for output in cell.outputs]
        return [output.text for output in outputs if output.get("name") == "stderr"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory for what patchword measures once per machine."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def folder(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run in; nothing of the user's Jupyter, IPython or cache is read or written."""
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("PATCHWORD_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads of tests that run in parallel wait for each other
    work = tmp_path / "work"
    work.mkdir()
    return work


@pytest.fixture
def colors(tmp_path: Path) -> Path:
    """Two kinds of images, three of each, one of them as PNG; and a damaged file."""
    directory = tmp_path / "colors"
    directory.mkdir()
    rng = np.random.default_rng(0)
    for number in range(3):
        for name, color in {"sky": (90, 150, 230), "grass": (60, 130, 40)}.items():
            pixels = rng.normal(color, 12, (40, 48, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(directory / f"{name}{number}.{'png' if number == 2 else 'jpg'}")
    (directory / "torn.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    return directory


def run_script(name: str, *arguments: object, cwd: Path) -> str:
    """Run a script; return what it printed."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_your_photos_trains_a_model_on_drawn_shapes_and_measures_it(folder: Path) -> None:
    notebook = ExecutedNotebook("your_photos.ipynb", folder, BUDGET=None)  # epochs: a budget would depend on the speed
    run = folder / "runs/shapes"
    assert len(list((folder / "runs/data/shapes/train").rglob("*.jpg"))) == 250
    test = read_json(run / "model.json")["provenance"]["metrics"]["test"]
    assert test["n"] == 100
    assert test["top1"] > 0.4  # five classes: chance is 0.2
    assert f"{test['top1']:.1%}" in notebook.text("metrics")
    assert len(re.findall("95% confidence interval", notebook.text("metrics"))) == 3
    assert "unreadable" not in notebook.text("doctor")
    probabilities = [float(value) for value in re.findall(r"([\d.]+)%", notebook.text("predict"))]
    assert len(probabilities) == 3
    assert probabilities == sorted(probabilities, reverse=True)
    assert [notebook.num_images(cell) for cell in ("look", "counts", "curves", "explain", "mistakes")] == [1] * 5
    assert (run / "evaluation/report.html").is_file()
    assert notebook.text("serve").strip() == "patchword serve runs/shapes"
    assert notebook.warnings() == []


FIGURES = {
    *("walkthrough", "filters", "attention_distance", "heads", "rollout", "explanations", "classes", "faithfulness"),
}


@pytest.mark.slow
@pytest.mark.parametrize("has_positions", [False, True], ids=["bundled-model", "learned-positions"])
def test_paper_figures_are_drawn_for_models_with_and_without_a_position_table(
    folder: Path, has_positions: bool
) -> None:
    parameters = {}
    if has_positions:
        write_checkpoint(folder / "small", make_checkpoint(pos_embed="learned"))
        parameters = {"MODEL": "small"}
    notebook = ExecutedNotebook("paper_figures.ipynb", folder, **parameters)
    files = {path.stem: path for path in (folder / "runs/paper_figures").iterdir()}
    assert files.keys() == FIGURES | ({"positions"} if has_positions else set())
    for path in files.values():
        with Image.open(path) as image:
            assert np.asarray(image.convert("L")).std() > 5  # not blank
    assert ("no vector per position" in notebook.text("positions")) is not has_positions
    rows = [line.split() for line in notebook.text("areas").splitlines()[1:]]
    assert len(rows) == 6
    assert all(0 <= float(area) <= 1 for row in rows for area in row[-3:-1])
    assert notebook.warnings() == []


@pytest.mark.slow
def test_int8_export_agrees_with_its_model_and_the_server_responds(folder: Path) -> None:
    engines = ["torch", "onnx", "onnx-int8"]
    notebook = ExecutedNotebook(
        "int8_export_and_serving.ipynb", folder, ENGINES=engines, SECONDS=0.05, EPOCHS=3, MAX_DROP=5.0
    )
    check = read_json(folder / "runs/export/model-int8.onnx.check.json")
    assert check["int8"] is True
    assert check["accuracy"]["before"] > 0.5  # ten classes: chance is 0.1
    assert check["accuracy"]["after"] >= check["accuracy"]["before"] - 0.05
    rows = [line.split() for line in notebook.text("bench").splitlines()[1:]]
    assert [row[:2] for row in rows] == [[name, batch] for name in engines for batch in ("1", "8", "32")]
    assert all(row[4] == "100.0%" for row in rows if row[0] == "onnx")
    agreement = re.search(r"same class for ([\d.]+)%", notebook.text("int8"))
    assert agreement is not None
    assert float(agreement[1]) > 90
    accuracy = re.search(r"exported file: ([\d.]+)%", notebook.text("onnxruntime-accuracy"))
    assert accuracy is not None
    assert float(accuracy[1]) / 100 == pytest.approx(check["accuracy"]["after"], abs=0.01)
    session = onnxruntime.InferenceSession(folder / "runs/export/model-int8.onnx")
    probabilities = session.run(None, {"pixels": np.zeros((1, 20, 30, 3), np.uint8)})[0]
    assert probabilities.shape == (1, 10)
    assert probabilities.sum() == pytest.approx(1, abs=1e-5)
    assert len(re.findall(r"%  \d", notebook.text("request"))) == 3
    assert notebook.cells["explanation"].outputs[0].data["image/png"]
    assert notebook.text("stop").strip() == "exit code 0"
    assert notebook.warnings() == []


@pytest.mark.slow
def test_batch_predict_writes_a_row_for_every_image_and_the_reason_if_it_is_unreadable(
    folder: Path, colors: Path
) -> None:
    printed = run_script("batch_predict_to_csv.py", colors, "predictions.csv", cwd=folder)
    assert printed == "6 images classified, 1 unreadable\n"
    with (folder / "predictions.csv").open(newline="", encoding="utf-8") as file:
        rows = {Path(row["path"]).name: row for row in csv.DictReader(file)}
    assert set(rows) == {path.name for path in colors.iterdir()}
    assert rows["torn.jpg"]["label"] == ""
    assert "torn.jpg" in rows["torn.jpg"]["error"]
    readable = [row for name, row in rows.items() if name != "torn.jpg"]
    assert all(row["error"] == "" and 0.1 <= float(row["probability"]) <= 1 for row in readable)


@pytest.mark.slow
def test_embed_and_search_finds_images_of_the_same_kind(folder: Path, colors: Path) -> None:
    printed = run_script("embed_and_search.py", colors / "sky0.jpg", colors, "--top", 2, cwd=folder).splitlines()
    skipped, *neighbors = printed
    assert skipped.startswith("skipped: ")
    assert "torn.jpg" in skipped
    assert {Path(line.split()[-1]).name for line in neighbors} == {"sky1.jpg", "sky2.png"}
    similarities = [float(line.split()[0]) for line in neighbors]
    assert similarities == sorted(similarities, reverse=True)
    assert similarities[0] <= 1


@pytest.mark.slow
def test_train_from_scratch_learns_digits(folder: Path) -> None:
    printed = run_script("train_from_scratch.py", "--epochs", 3, "--out", "run", cwd=folder)
    metrics = read_json(folder / "run/model.json")["provenance"]["metrics"]["test"]
    assert metrics["n"] == 397
    assert metrics["top1"] > 0.5  # ten classes: chance is 0.1
    assert f"test accuracy {metrics['top1']:.1%} on 397 images" in printed
    assert re.search(r"predicted \d with probability [\d.]+%; the label is 2", printed)
    assert (folder / "run/report.html").is_file()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=file_name)
def test_notebook_is_valid_and_has_no_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.id for cell in code if cell.outputs or cell.execution_count is not None] == []
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.language_info == {"name": "python"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=file_name)
def test_cells_have_readable_ids_and_text_between_them(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    assert [cell.id for cell in cells if not re.fullmatch(r"[a-z][a-z0-9-]*", cell.id)] == []
    assert cells[0].cell_type == "markdown"
    assert cells[0].source.startswith("# ")
    first_code = next(cell for cell in cells if cell.cell_type == "code")
    assert first_code.metadata.tags == ["parameters"]
    assert [cell.id for cell in cells if len(cell.source.splitlines()) > 30] == []


def test_readme_lists_every_example_and_links_exist() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in (*NOTEBOOKS, *SCRIPTS) if f"]({path.name})" not in text] == []
    pages = {"README.md": text}
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        pages[path.name] = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    for name, page in pages.items():
        targets = re.findall(r"\]\(([^)#]+)\)", page)
        local = [target for target in targets if not target.startswith("https://")]
        assert [target for target in local if not (EXAMPLES / target).exists()] == [], name
