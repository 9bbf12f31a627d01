"""The commands as users type them: output, exit codes and error messages."""

import contextlib
import csv
import functools
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

import patchword
from helpers.color_classifier import COLORS, color_checkpoint
from helpers.command import run, run_in_process
from helpers.hub_server import REPO, Hub
from helpers.small_checkpoint import make_checkpoint as small_checkpoint
from patchword.checkpoints import Checkpoint, read_checkpoint, write_checkpoint
from patchword.cli import main as cli
from patchword.cli.config_flags import FOREIGN_FLAGS, RENAMED_FLAGS, model_flags, run_flags
from patchword.config import ViTConfig
from patchword.data.image_decoder import load_image
from patchword.data.preprocess import Preprocess
from patchword.errors import ConfigError, ImageError
from patchword.inference.classifier import Classifier
from patchword.inference.predict import fingerprint
from patchword.inference.prediction_csv import PredictionTable
from patchword.models import build_model
from patchword.recipes import load_recipe

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model", color_checkpoint())
    return tmp_path / "model"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, color in COLORS.items():
        (tmp_path / "data" / name).mkdir(parents=True)
        Image.new("RGB", (20, 30), color).save(tmp_path / "data" / name / "a.png")
    return tmp_path / "data"


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Run:
    return functools.partial(run_in_process, capsys)


SLOW_IMPORTS = ("torch", "numpy", "ray", "obstore", "pyarrow")


@pytest.mark.parametrize("words", [["--help"], ["predict", "--help"], ["embed", "--help"]], ids=" ".join)
def test_help_imports_nothing_slow(words: list[str]) -> None:
    """Importing torch would take seconds; without it --help takes 0.3 s."""
    script = "import sys; from patchword.cli.main import main\n"
    script += f"try: main({words})\nexcept SystemExit: print('loaded:', *(set({SLOW_IMPORTS}) & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.endswith("loaded:\n")
    if words == ["--help"]:
        assert all(name in result.stdout for name in cli.COMMANDS)


@pytest.mark.slow
def test_small_predictions_import_no_extra(tmp_path: Path) -> None:
    """Object stores, Parquet and Ray are imported only when a job asks for them."""
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    script = "import sys; from patchword.cli.main import main\n"
    script += f"try: main(['predict', 'patchword:cifar10', '{tmp_path}'])\n"
    script += "except SystemExit: print('loaded:', *({'ray', 'obstore', 'pyarrow'} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.endswith("loaded:\n"), result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_an_example(command: str) -> None:
    result = run(command, "--help")
    assert result.returncode == 0
    assert f"Example: patchword {command}" in result.stdout


@pytest.mark.slow
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


@pytest.mark.slow
def test_predict_prints_text_and_writes_csv(model: Path, data: Path, tmp_path: Path) -> None:
    result = run("predict", model, data / "red/a.png")
    assert result.returncode == 0
    assert "red" in result.stdout
    assert "%" in result.stdout
    out = tmp_path / "table.csv"
    assert run("predict", model, data, "--csv", out, "--top", 2).returncode == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["label_1"] for row in rows] == ["blue", "green", "red"]
    assert float(rows[0]["probability_1"]) > float(rows[0]["probability_2"])


@pytest.mark.slow
def test_evaluate(model: Path, data: Path) -> None:
    result = run("evaluate", model, data, "--json")
    assert result.returncode == 0
    document = json.loads(result.stdout)
    assert (document["top1"], document["n"], document["skipped"]) == (1.0, 3, 0)
    assert {"top5", "ece", "nll", "images_per_second", "per_class"} <= document.keys()
    assert re.search(r"top-1 +100\.00%", run("evaluate", model, data).stdout)


@pytest.mark.slow
def test_evaluate_compares_two_models_on_a_dataset(tmp_path: Path) -> None:
    """scikit-learn's digits with two untrained models, and every prediction in a CSV file."""
    config = ViTConfig(
        image_size=8, patch_size=4, in_channels=1, embed_dim=8, depth=1, num_heads=1, mlp_dim=8, num_classes=10
    )
    preprocess = Preprocess(size=(8, 8), mean=(0.3,), std=(0.4,))
    for name in ("one", "two"):
        torch.manual_seed(len(name) + ord(name[0]))
        tensors = dict(build_model(config).state_dict())
        tensors["head.weight"] = torch.randn(10, 8)
        write_checkpoint(tmp_path / name, Checkpoint(config, tensors, preprocess, tuple("0123456789")))
    table = tmp_path / "all.csv"
    result = run("evaluate", tmp_path / "one", "digits", "--compare-to", tmp_path / "two", "--csv", table, "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == document["n"] > 300
    assert document["top1"] == pytest.approx(sum(row["true"] == row["predicted"] for row in rows) / len(rows))
    low, high = document["intervals"]["top1"]
    assert low < document["top1"] < high < low + 0.2
    comparison = document["comparison"]
    assert comparison["second"] == document["top1"]
    assert comparison["difference"][0] <= comparison["second"] - comparison["first"]
    alone = run("evaluate", tmp_path / "two", "digits")
    assert f"{comparison['first']:.2%}" in alone.stdout
    same = run("evaluate", tmp_path / "one", "digits", "--compare-to", tmp_path / "one")
    assert "no significant difference" in same.stdout
    assert "p = 1)" in same.stdout
    assert run("evaluate", tmp_path / "one", "digits", "--csv", table).returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["index", "label"])
def test_class_folders_by_index_or_label(scheme: str, model: Path, data: Path) -> None:
    for index, name in enumerate(COLORS):
        (data / name).rename(data / (f"{index:03}" if scheme == "index" else name.upper()))
    assert json.loads(run("evaluate", model, data, "--json").stdout)["top1"] == 1.0


@pytest.mark.slow
def test_convert_with_model_fields(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m.pth", small_checkpoint(), "torchvision")
    refused = run("convert", tmp_path / "m.pth", tmp_path / "out", "--to", "transformers")
    assert refused.returncode == 2
    assert "--num-heads" in refused.stderr
    assert not (tmp_path / "out").exists()
    fields = ("--num-heads", 3, "--image-size", 48, 64, "--num_classes=9")
    done = run("convert", tmp_path / "m.pth", tmp_path / "out", "--to", "transformers", *fields)
    assert done.returncode == 0, done.stderr
    config = read_checkpoint(tmp_path / "out").config
    assert (config.num_heads, config.image_size, config.num_classes) == (3, (48, 64), 9)
    again = run("convert", tmp_path / "m.pth", tmp_path / "out", "--to", "timm", *fields)
    assert again.returncode == 2
    assert str(tmp_path / "out") in again.stderr
    assert "--overwrite" in again.stderr


@pytest.mark.slow
def test_labels_and_channel_statistics_as_flags(model: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("rot\ngrün\nblau\n", encoding="utf-8")
    image = data / "green/a.png"
    result = run("predict", model, image, "--labels", tmp_path / "labels.txt", "--json")
    assert json.loads(result.stdout)[0]["predictions"][0]["label"] == "grün"
    default = json.loads(run("predict", model, image, "--json").stdout)[0]["predictions"][0]["probability"]
    flags = ("--mean", 0, 0, 0, "--std", 1, 1, 1)
    other = json.loads(run("predict", model, image, "--json", *flags).stdout)[0]["predictions"][0]["probability"]
    assert other < default


@pytest.mark.slow
def test_hub_reference(tmp_path: Path) -> None:
    """Downloads hf:owner/name over a real socket and predicts."""
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
    ("arguments", "message"),
    [
        (["predict", "MODEL"], "IMAGE"),
        (["predict", "no-such-model", "DATA"], "no-such-model"),
        (["predict", "MODEL", "a.png", "--top", "0"], r"--top .*\b1\b.*\b0\b"),
        (["evaluate", "MODEL", "no-such-data"], "no-such-data"),
        (["evaluate", "MODEL", "DATA/red"], "DATA/red"),
        (["evaluate", "MODEL", "DATA", "--batch-size", "0"], "--batch-size"),
        (["evaluate", "MODEL", "DATA", "--num-heads", "three"], "--num-heads .*'three'"),
        (["evaluate", "MODEL", "DATA", "--num-heads"], "--num-heads .*value"),
        (["evaluate", "MODEL", "DATA", "--depth", "2"], "depth"),
        (["evaluate", "MODEL", "DATA", "--labels", "missing.txt"], r"--labels: missing\.txt"),
        (["convert", "MODEL", "OUT", "--to", "google"], r"google .*\*\.npz"),
        (["convert", "MODEL", "OUT", "--to", "jax"], "jax"),
        (["convert", "MODEL", "OUT", "--to", "timm", "--half"], "--half"),
        (["predikt", "MODEL"], "predict"),
        (["predict", "MODEL", "a.png", "--csv", "DATA/red/a.png"], r"red/a\.png .*--overwrite"),
        (["predict", "MODEL", "a.png", "--csv", "new.csv", "--json"], "--csv .*--json"),
        (["predict", "MODEL", "a.png", "--mean", "127", "127", "127"], "--mean .*scale"),
        (["predict", "MODEL", "a.png", "--crop", "2"], "--crop must be .*not 2"),
        (["evaluate", "MODEL", "DATA", "--image-size", "abc"], "--image-size needs one or more numbers, not 'abc'"),
        (["inspect", "MODEL", "--out", "OUT", "--label", "red"], "--label"),
        (["inspect", "MODEL", "DATA", "--out", "OUT", "--max-images", "0"], r"--max-images .*\b1\b.*\b0\b"),
        (["push", "MODEL", "elsewhere"], "hf:owner/name"),
        (["bench", "MODEL", "--seconds", "0"], "--seconds"),
        (["serve", "MODEL", "--queue-size", "0"], r"--queue-size .*\b1\b.*\b0\b"),
        (["doctor", "DATA", "--patch-size", "0"], r"--patch-size .*\b1\b"),
        (["predict", "hf:nonsense", "a.png"], "hf:nonsense"),
    ],
)
def test_invalid_requests_exit_with_2(
    arguments: list[str], message: str, model: Path, data: Path, command: Run
) -> None:
    paths = {"MODEL": model, "DATA": data, "DATA/red": data / "red", "OUT": data / "out"}
    paths["DATA/red/a.png"] = data / "red/a.png"
    result = command(*[paths.get(word, word) for word in arguments])
    output = result.stderr + result.stdout
    assert result.returncode == 2, output
    pattern = re.escape(str(paths[message])) if message in paths else message
    assert re.search(pattern, output), output
    assert not (data / "out").exists()


def test_invalid_request_prints_no_traceback(model: Path) -> None:
    result = run("predict", model, "a.png", "--top", 0)
    assert result.returncode == 2
    assert result.stderr.startswith("patchword: ")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["predict", "m", "a.png", "--topp", "3"], "--top"),
        (["predict", "m", "a.png", "--num-head", "3"], "--num-heads"),
        (["inspect", "m", "--out", "o", "--most", "3"], "--max-images"),
        (["evaluate", "m", "d", "--against", "o"], "--compare-to"),
        (["export", "m", "o.onnx", "--whole"], "--include-preprocessing"),
        (["export", "m", "o.onnx", "--merge=0.1"], "--tome-ratio"),
        (["serve", "m", "--threads", "2"], "--num-threads"),
        (["serve", "m", "--queue", "2"], "--queue-size"),
        (["predict", "m", "a.png", "--positions", "none"], "--pos-embed"),
        (["train", "digits", "--flip-test", "true"], "--tta-flip"),
        (["train", "digits", "--optim.clip", "1"], "--optim.clip-grad-norm"),
        (["train", "digits", "--lr", "1"], "--optim.lr"),
        (["train", "digits", "--learning_rate=1"], "--optim.lr"),
        (["train", "digits", "--weight-decay", "1"], "--optim.weight-decay"),
        (["train", "digits", "--opt", "adamw"], "--optim.name"),
        (["train", "digits", "--workers", "1"], "--data.num-workers"),
        (["train", "digits", "--img-size", "8"], "--image-size"),
        (["train", "digits", "--num-epochs", "1"], "--epochs"),
        (["train", "digits", "--num-train-epochs", "1"], "--epochs"),
        (["train", "digits", "--output-dir", "o"], "--out"),
        (["train", "digits", "--pretrained"], "--init"),
        (["train", "digits", "--mixup", "1"], "--augment.mixup"),
    ],
)
def test_unknown_flags_suggest_the_right_one(arguments: list[str], suggestion: str) -> None:
    with pytest.raises(ConfigError, match=rf" {suggestion}\?") as error:
        cli.run_command(arguments)
    assert error.value.code == "unknown_option"


def test_suggested_flags_exist() -> None:
    parameters = {name for command in cli.COMMANDS.values() for name in inspect.signature(command).parameters}
    known = {"--" + name.replace("_", "-") for name in parameters} | set(run_flags(load_recipe("finetune")))
    assert {*RENAMED_FLAGS.values(), *FOREIGN_FLAGS.values()} <= known
    assert not known & set(FOREIGN_FLAGS)


@pytest.mark.parametrize("flag", ["--lr", "--pretrained", "--budget"])
def test_flags_of_other_commands_are_not_suggested(flag: str) -> None:
    with pytest.raises(ConfigError) as error:
        cli.run_command(["resume", "run", flag, "1"])
    assert "Did you mean" not in str(error.value)
    assert "--init" not in str(error.value)


@pytest.mark.slow
def test_missing_images_exit_with_3(model: Path) -> None:
    result = run("predict", model, "missing.png", "--json")
    assert result.returncode == 3
    with pytest.raises(ImageError) as error:
        load_image("missing.png")
    assert error.value.code == "image_not_found"
    assert json.loads(result.stdout)[0]["error"] == str(error.value)


@pytest.mark.slow
def test_top1_on_imagenet_matches_timm(ti16: Path, imagenet: Path) -> None:
    """Timm on exactly these files: top-1 0.748, top-5 0.923, NLL 1.0022."""
    result = run("evaluate", ti16, imagenet, "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["n"] == 1000
    assert document["skipped"] == 0
    assert document["top1"] == pytest.approx(0.748, abs=0.003)
    assert document["top5"] == pytest.approx(0.923, abs=0.003)
    assert document["nll"] == pytest.approx(1.0022, abs=0.002)


def test_extract_config_flags() -> None:
    rest, fields = cli.extract_config_flags(
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
    for arguments in (["--image-size", "224x320", "ax.png"], ["--image-size=224x320", "ax.png"]):
        assert cli.extract_config_flags(arguments, model_flags()) == (["ax.png"], {"image_size": [224, 320]})


@pytest.mark.slow
def test_labels_file_must_be_a_list(model: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.json").write_text('{"0": "a"}')
    result = run("predict", model, data / "red/a.png", "--labels", tmp_path / "labels.json")
    assert result.returncode == 2
    assert re.search(r"--labels: .*labels\.json .*list", result.stderr), result.stderr


def test_run_as_a_module() -> None:
    result = subprocess.run([sys.executable, "-m", "patchword", "--version"], capture_output=True, text=True)
    assert result.stdout.strip() == patchword.__version__


def test_cli_does_not_import_torch() -> None:
    code = "import sys, patchword.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_killed_csv_is_resumed(model: Path, tmp_path: Path) -> None:
    """After repeated kills, and with unreadable files, every image has exactly one row."""
    folder = tmp_path / "many"
    folder.mkdir()
    names = itertools.cycle(COLORS.values())
    for number in range(600):
        Image.new("RGB", (9, 9), next(names)).save(folder / f"{number:04}.png")
    (folder / "0100.png").write_bytes(b"\x89PNG")
    (folder / 'nüw\nline, "quoted".png').write_bytes((folder / "0001.png").read_bytes())
    expected, table = tmp_path / "expected.csv", tmp_path / "table.csv"
    assert run("predict", model, folder, "--csv", expected).returncode == 3
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
        if kills >= 1 and partial.exists():  # the last row is incomplete
            os.truncate(partial, partial.stat().st_size - 7)
    assert kills >= 1
    assert table.read_bytes() == expected.read_bytes()
    assert not partial.exists()
    assert sorted(p.name for p in tmp_path.glob("*.csv*")) == ["expected.csv", "table.csv"]


@pytest.mark.slow
def test_resumed_csv_contains_only_requested_images(model: Path, data: Path, tmp_path: Path) -> None:
    """Rows that an earlier process wrote for another folder are dropped."""
    table, expected = tmp_path / "table.csv", tmp_path / "expected.csv"
    assert run("predict", model, data, "--csv", expected).returncode == 0
    classifier = Classifier.load(model)
    started = PredictionTable(table, 3, fingerprint(classifier), ["elsewhere.png"])
    with contextlib.suppress(KeyboardInterrupt), started:
        started.write({"path": "elsewhere.png", "error": "no image"})
        raise KeyboardInterrupt
    assert "elsewhere.png" in Path(f"{table}.partial").read_text()
    assert run("predict", model, data, "--csv", table).returncode == 0
    assert table.read_bytes() == expected.read_bytes()


@pytest.mark.slow
def test_csv_of_another_model_is_not_resumed(model: Path, data: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    Path(f"{table}.partial").write_text("path,error\r\n")
    Path(f"{table}.partial.json").write_text("{}")
    result = run("predict", model, data, "--csv", table)
    assert result.returncode == 2
    assert re.search(r"table\.csv\.partial .*--top", result.stderr), result.stderr
    assert not table.exists()
    assert Path(f"{table}.partial").exists()


@pytest.mark.slow
def test_escape_sequences_in_names_are_not_printed(model: Path, data: Path) -> None:
    (data / "\x1b[31mred.png").write_bytes(b"no image")
    result = run("predict", model, data)
    assert result.returncode == 3
    assert "\x1b" not in result.stderr
    assert "red.png" in result.stderr


def test_bench_lists_unreadable_images(model: Path, data: Path, command: Run) -> None:
    (data / "red/broken.png").write_bytes(b"no image")
    result = command("bench", model, "--engines", "torch", "--seconds", 0.01, "--verify", data, "--json")
    assert result.returncode == 3, result.stderr
    assert "broken.png" in result.stderr
    (row,) = json.loads(result.stdout)
    assert row["accuracy"] == 1.0


@pytest.mark.parametrize("name", ["predict", "evaluate", "serve"])
def test_new_head_cannot_predict(model: Path, data: Path, command: Run, name: str) -> None:
    inputs = ["--port", 0] if name == "serve" else [data]
    result = command(name, model, *inputs, "--num-classes", 7)
    assert result.returncode == 2
    assert "--num-classes" in result.stderr
