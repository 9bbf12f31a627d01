"""The commands as a user types them: output, exit codes, and a sentence for every mistake."""

import csv
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import patchword
from helpers.color_classifier import COLOURS, colour_checkpoint
from helpers.command import run
from helpers.hub_server import REPO, Hub
from helpers.small_checkpoint import make_checkpoint as small_checkpoint
from patchword.checkpoints import Checkpoint, read_checkpoint, write_checkpoint
from patchword.cli import main as cli
from patchword.cli.config_flags import model_flags
from patchword.config import ViTConfig
from patchword.data.preprocess import Preprocess
from patchword.inference.classifier import Classifier
from patchword.inference.predict import fingerprint
from patchword.inference.prediction_csv import Table
from patchword.models import build_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model", colour_checkpoint())
    return tmp_path / "model"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, colour in COLOURS.items():
        (tmp_path / "data" / name).mkdir(parents=True)
        Image.new("RGB", (20, 30), colour).save(tmp_path / "data" / name / "a.png")
    return tmp_path / "data"


def test_help_is_complete_and_imports_nothing_slow() -> None:
    """0.31 s on a quiet machine (LOG.md); what would make it seconds is an import of torch."""
    script = "import sys; from patchword.cli.main import main\n"
    script += "try: main(['--help'])\nexcept SystemExit: print('torch' in sys.modules, 'numpy' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.endswith("False False\n")
    assert all(name in result.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_an_example(command: str) -> None:
    result = run(command, "--help")
    assert result.returncode == 0
    assert f"Example: patchword {command}" in result.stdout


def test_predict_json(model: Path, data: Path) -> None:
    (data / "red/broken.jpg").write_bytes(b"\xff\xd8")
    result = run("predict", model, data, "--json", "--top", 2)
    assert result.returncode == 3
    rows = json.loads(result.stdout)  # nothing else on standard output
    assert [Path(row["path"]).parent.name for row in rows] == ["blue", "green", "red", "red"]
    assert list(rows[0]["predictions"][0]) == ["label", "index", "probability"]
    assert [row["predictions"][0]["label"] for row in rows[:3]] == ["blue", "green", "red"]
    assert "broken.jpg" in rows[3]["error"]
    assert "broken.jpg" in result.stderr
    assert "Traceback" not in result.stderr


def test_predict_for_people_and_for_tables(model: Path, data: Path, tmp_path: Path) -> None:
    shown = run("predict", model, data / "red/a.png")
    assert shown.returncode == 0
    assert "red" in shown.stdout
    assert "%" in shown.stdout
    out = tmp_path / "table.csv"
    assert run("predict", model, data, "--csv", out, "--top", 2).returncode == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["label_1"] for row in rows] == ["blue", "green", "red"]
    assert float(rows[0]["probability_1"]) > float(rows[0]["probability_2"])


def test_evaluate(model: Path, data: Path) -> None:
    result = run("evaluate", model, data, "--json")
    assert result.returncode == 0
    found = json.loads(result.stdout)
    assert (found["top1"], found["n"], found["skipped"]) == (1.0, 3, 0)
    assert {"top5", "ece", "nll", "images_per_second", "per_class"} <= found.keys()
    assert "top-1     100.00%" in run("evaluate", model, data).stdout


def test_evaluate_a_data_set_against_another_model(tmp_path: Path) -> None:
    """scikit-learn's digits by two models that know nothing; every prediction in a table."""
    config = ViTConfig(
        image_size=8, patch_size=4, in_channels=1, embed_dim=8, depth=1, num_heads=1, mlp_dim=8, num_classes=10
    )
    prepared = Preprocess(size=(8, 8), mean=(0.3,), std=(0.4,))
    for name in ("one", "two"):
        torch.manual_seed(len(name) + ord(name[0]))
        tensors = dict(build_model(config).state_dict())
        tensors["head.weight"] = torch.randn(10, 8)
        write_checkpoint(tmp_path / name, Checkpoint(config, tensors, prepared, tuple("0123456789")))
    table = tmp_path / "all.csv"
    result = run("evaluate", tmp_path / "one", "digits", "--against", tmp_path / "two", "--csv", table, "--json")
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == said["n"] > 300
    assert said["top1"] == pytest.approx(sum(row["true"] == row["predicted"] for row in rows) / len(rows))
    low, high = said["intervals"]["top1"]
    assert low < said["top1"] < high < low + 0.2
    about = said["comparison"]
    assert about["second"] == said["top1"]
    assert about["difference"][0] <= about["second"] - about["first"]
    alone = run("evaluate", tmp_path / "two", "digits")
    assert f"{about['first']:.2%}" in alone.stdout
    shown = run("evaluate", tmp_path / "one", "digits", "--against", tmp_path / "one")
    assert "no significant difference" in shown.stdout
    assert "p = 1)" in shown.stdout
    assert run("evaluate", tmp_path / "one", "digits", "--csv", table).returncode == 2


@pytest.mark.parametrize("scheme", ["index", "label"])
def test_class_folders_by_index_or_label(scheme: str, model: Path, data: Path) -> None:
    for index, name in enumerate(COLOURS):
        (data / name).rename(data / (f"{index:03}" if scheme == "index" else name.upper()))
    assert json.loads(run("evaluate", model, data, "--json").stdout)["top1"] == 1.0


def test_convert_and_state_fields(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m.pth", small_checkpoint(), "torchvision")
    refused = run("convert", tmp_path / "m.pth", tmp_path / "out", "--to", "transformers")
    assert refused.returncode == 2
    assert "--num-heads" in refused.stderr
    assert not (tmp_path / "out").exists()
    told = ("--num-heads", 3, "--image-size", 48, 64, "--num_classes=9")
    done = run("convert", tmp_path / "m.pth", tmp_path / "out", "--to", "transformers", *told)
    assert done.returncode == 0, done.stderr
    config = read_checkpoint(tmp_path / "out").config
    assert (config.num_heads, config.image_size, config.num_classes) == (3, (48, 64), 9)
    again = run("convert", tmp_path / "m.pth", tmp_path / "out", "--to", "timm", *told)
    assert again.returncode == 2
    assert "exists already" in again.stderr


def test_labels_and_statistics_by_flag(model: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("rot\ngrün\nblau\n", encoding="utf-8")
    picture = data / "green/a.png"
    result = run("predict", model, picture, "--labels", tmp_path / "labels.txt", "--json")
    assert json.loads(result.stdout)[0]["predictions"][0]["label"] == "grün"
    plain = json.loads(run("predict", model, picture, "--json").stdout)[0]["predictions"][0]["probability"]
    flags = ("--mean", 0, 0, 0, "--std", 1, 1, 1)
    other = json.loads(run("predict", model, picture, "--json", *flags).stdout)[0]["predictions"][0]["probability"]
    assert other < plain


def test_a_hub_reference(tmp_path: Path) -> None:
    """hf:owner/name over a real socket, from download to prediction."""
    write_checkpoint(tmp_path / "m", small_checkpoint(), "transformers")
    hub = Hub()
    try:
        hub.files = {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()}
        Image.new("RGB", (50, 40), "red").save(tmp_path / "a.png")
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        result = run("predict", f"hf:{REPO}", tmp_path / "a.png", "--json", **environment)
    finally:
        hub.stop()
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)[0]["predictions"][0]["label"] in ("ant", "bee", "cat", "dog")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["predict", "MODEL"], "No picture was named"),
        (["predict", "nowhere", "a.png"], "There is no model at nowhere"),
        (["predict", "MODEL", "a.png", "--top", "0"], "--top must be at least 1"),
        (["evaluate", "MODEL", "nowhere"], "nowhere"),
        (["evaluate", "MODEL", "DATA/red"], "their classes are unknown"),
        (["evaluate", "MODEL", "DATA", "--batch-size", "0"], "--batch-size"),
        (["evaluate", "MODEL", "DATA", "--num-heads", "three"], "num_heads"),
        (["evaluate", "MODEL", "DATA", "--num-heads"], "needs a value"),
        (["evaluate", "MODEL", "DATA", "--depth", "2"], "depth"),
        (["evaluate", "MODEL", "DATA", "--labels", "nowhere.txt"], "nowhere.txt"),
        (["convert", "MODEL", "OUT", "--to", "google"], "is written to a file named *.npz"),
        (["convert", "MODEL", "OUT", "--to", "jax"], "jax"),
        (["predikt", "MODEL"], "predict"),
        (["predict", "MODEL", "a.png", "--topp", "3"], "Did you mean --top?"),
        (["predict", "MODEL", "a.png", "--num-head", "3"], "Did you mean --num-heads?"),
        (["predict", "MODEL", "a.png", "--csv", "DATA/red/a.png"], "exists already"),
        (["predict", "MODEL", "a.png", "--csv", "new.csv", "--json"], "choose one of them"),
        (["predict", "MODEL", "a.png", "--mean", "127", "127", "127"], "on the scale 0..1"),
        (["evaluate", "MODEL", "DATA", "--image-size", "abc"], "needs a value"),
        (["predict", "hf:nonsense", "a.png"], "hf:nonsense"),
    ],
)
def test_mistakes_get_a_sentence_and_code_2(arguments: list[str], said: str, model: Path, data: Path) -> None:
    names = {"MODEL": str(model), "DATA": str(data), "DATA/red": str(data / "red"), "OUT": str(data / "out")}
    names["DATA/red/a.png"] = str(data / "red/a.png")
    result = run(*[names.get(a, a) for a in arguments])
    output = result.stderr + result.stdout
    assert result.returncode == 2, output
    assert said in output
    assert "Traceback" not in output


def test_missing_pictures_are_code_3(model: Path) -> None:
    result = run("predict", model, "gone.png", "--json")
    assert result.returncode == 3
    assert "no such file" in json.loads(result.stdout)[0]["error"]


def test_top1_on_imagenet_is_the_published_one(ti16: Path, imagenet: Path) -> None:
    """Timm on exactly these files: top-1 0.748, top-5 0.923, NLL 1.0022."""
    result = run("evaluate", ti16, imagenet, "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["n"] == 1000
    assert found["skipped"] == 0
    assert found["top1"] == pytest.approx(0.748, abs=0.003)
    assert found["top5"] == pytest.approx(0.923, abs=0.003)
    assert found["nll"] == pytest.approx(1.0022, abs=0.002)


def test_fields_from_the_command_line() -> None:
    rest, fields = cli.take_fields(
        [
            "predict",
            "m",
            "--image-size",
            "32",
            "64",
            "a.png",
            "--top",
            "3",
            "--pooling",
            "average",
            "--norm-eps=1e-5",
            "--class-token",
            "false",
            "--mean",
            "0.5",
            "0.4",
            "0.3",
            "b.png",
            "--std=0.5",
        ],
        model_flags(),
    )
    assert rest == ["predict", "m", "a.png", "--top", "3", "b.png"]
    model_fields = {"image_size": [32, 64], "pooling": "average", "norm_eps": 1e-5, "class_token": False}
    assert fields == {**model_fields, "mean": [0.5, 0.4, 0.3], "std": 0.5}
    for words in (["--image-size", "224x320", "ax.png"], ["--image-size=224x320", "ax.png"]):
        assert cli.take_fields(words, model_flags()) == (["ax.png"], {"image_size": [224, 320]})


def test_labels_must_be_a_list(model: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.json").write_text('{"0": "a"}')
    result = run("predict", model, data / "red/a.png", "--labels", tmp_path / "labels.json")
    assert result.returncode == 2
    assert "must be a JSON list" in result.stderr


def test_as_a_module() -> None:
    result = subprocess.run([sys.executable, "-m", "patchword", "--version"], capture_output=True, text=True)
    assert result.stdout.strip() == patchword.__version__


def test_torch_is_not_needed_for_help() -> None:
    code = "import sys, patchword.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_killed_table_goes_on(model: Path, tmp_path: Path) -> None:
    """Killed again and again, with files that cannot be read: each picture once, as if nothing had happened."""
    folder = tmp_path / "many"
    folder.mkdir()
    names = itertools.cycle(COLOURS.values())
    for number in range(600):
        Image.new("RGB", (9, 9), next(names)).save(folder / f"{number:04}.png")
    (folder / "0100.png").write_bytes(b"\x89PNG")
    (folder / 'nüw\nline, "quoted".png').write_bytes((folder / "0001.png").read_bytes())
    whole, table = tmp_path / "whole.csv", tmp_path / "table.csv"
    assert run("predict", model, folder, "--csv", whole).returncode == 3
    partial, kills = Path(f"{table}.partial"), 0
    command = [sys.executable, "-m", "patchword", "predict", str(model), str(folder), "--csv", str(table)]
    while not table.exists():
        before = partial.stat().st_size if partial.exists() else 0
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and kills < 3:
                if partial.exists() and partial.stat().st_size > before + 2000:
                    process.kill()
                    kills += 1
                    break
        if kills >= 1 and partial.exists():  # and the last row is torn
            os.truncate(partial, partial.stat().st_size - 7)
    assert kills >= 1
    assert table.read_bytes() == whole.read_bytes()
    assert not partial.exists()
    assert sorted(p.name for p in tmp_path.glob("*.csv*")) == ["table.csv", "whole.csv"]


def test_a_table_goes_on_with_the_pictures_that_are_asked_for(model: Path, data: Path, tmp_path: Path) -> None:
    """Rows that an earlier process left of another folder are not among them."""
    table, whole = tmp_path / "table.csv", tmp_path / "whole.csv"
    assert run("predict", model, data, "--csv", whole).returncode == 0
    classifier = Classifier.load(model)
    with pytest.raises(KeyboardInterrupt), Table(table, 3, fingerprint(classifier), ["elsewhere.png"]) as begun:
        begun.write({"path": "elsewhere.png", "error": "no picture"})
        raise KeyboardInterrupt
    assert "elsewhere.png" in Path(f"{table}.partial").read_text()
    assert run("predict", model, data, "--csv", table).returncode == 0
    assert table.read_bytes() == whole.read_bytes()


def test_a_table_of_another_model_is_not_continued(model: Path, data: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    Path(f"{table}.partial").write_text("path,error\r\n")
    Path(f"{table}.partial.json").write_text("{}")
    result = run("predict", model, data, "--csv", table)
    assert result.returncode == 2
    assert "another model or another --top" in result.stderr
    assert not table.exists()
    assert Path(f"{table}.partial").exists()


def test_sizes_that_are_none_and_names_that_command_the_terminal(model: Path, data: Path) -> None:
    result = run("doctor", data, "--patch-size", 0)
    assert result.returncode == 2
    assert "at least 1" in result.stderr
    assert "Traceback" not in result.stderr
    (data / "\x1b[31mred.png").write_bytes(b"no picture")
    result = run("predict", model, data)
    assert result.returncode == 3
    assert "\x1b" not in result.stderr
    assert "red.png" in result.stderr
