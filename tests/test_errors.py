"""Stable codes of errors and notes, control flow that does not depend on messages, and exit codes."""

import ast
import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from starlette.applications import Starlette
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

import patchword
from helpers.color_classifier import color_checkpoint
from helpers.command import run
from helpers.small_checkpoint import make_checkpoint
from helpers.small_study import BASE, little_study
from patchword import errors
from patchword.checkpoints import write_checkpoint
from patchword.checkpoints.tensor_files import read_tensors
from patchword.cli.output import print_train_result
from patchword.data import download  # defines an error of its own
from patchword.data.sources import decode_image
from patchword.engines import engine_trials as trial
from patchword.errors import CheckpointError, ConfigError, ImageError, Note, PatchwordError, TrainingError
from patchword.serve import app, service
from patchword.serve.limits import Limits
from patchword.serve.problem_json import STATUSES, Problem
from patchword.serve.uploads import Upload, read_uploads
from patchword.studies import runner as studies
from patchword.studies.study import Cell
from patchword.training import TrainResult

SOURCE = Path(patchword.__file__).parent
REWORDED = "Worded otherwise."

# Programs rely on these: codes may be added, but none may change its meaning or disappear.
CLASS_CODES = {
    "PatchwordError": "patchword_error",
    "ConfigError": "invalid_config",
    "BudgetTooShortError": "budget_too_short",
    "CheckpointError": "invalid_checkpoint",
    "ConversionError": "conversion_failed",
    "UnknownArchitectureError": "architecture_unknown",
    "ExportError": "export_failed",
    "DataError": "invalid_data",
    "ImageError": "unreadable_image",
    "DownloadError": "unreachable",
    "OutputError": "cannot_write",
    "StorageError": "storage_failed",
    "HubError": "hub_failed",
    "TrainingError": "training_failed",
}
RAISED_CODES = {
    "access_denied",
    "chunk_crashes",
    "image_crashes",
    "machine_differs",
    "output_differs",
    "output_not_empty",
    "parts_missing",
    "ray_failed",
    "ray_unreachable",
    "unsupported_by_fsdp",
    "invalid_key",
    "invalid_reference",
    "object_changed",
    "object_not_found",
    "out_of_range",
    "storage_unreachable",
    "invalid_arguments",
    "missing_argument",
    "unknown_command",
    "ambiguous_class",
    "bf16_unsupported",
    "checkpoint_not_saved",
    "checkpoints_damaged",
    "image_damaged",
    "image_empty",
    "image_not_a_file",
    "image_not_found",
    "image_not_in_row",
    "image_out_of_memory",
    "image_outside_folder",
    "image_permission_denied",
    "image_too_large",
    "image_unsupported",
    "invalid_base64",
    "invalid_duration",
    "invalid_form",
    "invalid_json",
    "invalid_parameter",
    "no_image",
    "no_label_column",
    "table_mismatch",
    "not_a_study",
    "not_finite",
    "output_exists",
    "override_ignored",
    "run_differs",
    "run_exists",
    "run_finished",
    "run_locked",
    "study_differs",
    "too_many_images",
    "unknown_class",
    "unknown_field",
    "unknown_option",
    "unknown_parameter",
    "unknown_model",
    "unknown_preset",
    "unsafe_pickle",
    "unsupported_by_model",
}
STATUS_CODES = {
    400: "bad_request",
    401: "unauthorized",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    422: "invalid_request",
    500: "internal_error",
    503: "unavailable",
    504: "response_timeout",
}
NOTE_CODES = {
    "machine_differs",
    "architecture_assumed",
    "architecture_by_name",
    "best_checkpoint_damaged",
    "budget_too_short",
    "checkpoint_damaged",
    "decoder_skipped",
    "duplicate_rows_left_out",
    "files_left_out",
    "finished",
    "folders_left_out",
    "head_probed",
    "field_overridden",
    "head_replaced",
    "image_size_assumed",
    "image_size_of_positions",
    "images_unreadable",
    "interpolation_not_kept",
    "labels_assumed",
    "metadata_not_stored",
    "multi_label_not_stored",
    "note",
    "numerics_differ",
    "odd_setting",
    "preprocess_assumed",
    "projection_assumed",
    "preprocess_not_stored",
    "preprocess_stated",
    "projection_removed",
    "run_unfinished",
    "samples_left_out",
    "shard_damaged",
    "shards_not_indexed",
    "shards_not_shuffled",
    "split_left_out",
    "temperature_not_stored",
    "trained_with_quick_gelu",
    "text_tower_skipped",
}


def subclasses(base: type[PatchwordError]) -> Iterator[type[PatchwordError]]:
    yield base
    for subclass in base.__subclasses__():
        yield from subclasses(subclass)


def calls() -> Iterator[ast.Call]:
    for path in SOURCE.rglob("*.py"):
        yield from (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def words(node: ast.expr) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


# ---- codes


def test_codes_of_classes() -> None:
    assert download.DownloadError.__module__.startswith("patchword.")
    ours = [each for each in subclasses(PatchwordError) if each.__module__.startswith("patchword.")]
    assert {each.__name__: each.code for each in ours} == CLASS_CODES
    assert all(each(REWORDED).code == each.code and str(each(REWORDED)) == REWORDED for each in ours)
    assert len(set(CLASS_CODES.values())) == len(CLASS_CODES)


def test_codes_that_are_raised() -> None:
    found = {word for call in calls() for key in call.keywords if key.arg == "code" for word in words(key.value)}
    reasons = ast.parse((SOURCE / "data/image_decoder.py").read_text())
    pairs = (n.value for n in ast.walk(reasons) if isinstance(n, ast.Return) and isinstance(n.value, ast.Tuple))
    found |= {word for pair in pairs for word in words(pair.elts[-1])}
    assert found - {"code"} == RAISED_CODES
    assert not RAISED_CODES & {*CLASS_CODES.values(), *STATUS_CODES.values()}


def test_codes_of_notes() -> None:
    made = [call for call in calls() if getattr(call.func, "id", "") in ("Note", "cls") and len(call.args) == 2]
    assert {word for call in made for word in words(call.args[1])} - {"code"} == NOTE_CODES


def test_codes_of_the_server() -> None:
    assert {status: code for status, (_, code) in STATUSES.items()} == STATUS_CODES
    assert Problem(422, REWORDED).code == "invalid_request"
    assert Problem(418, REWORDED).code == "http_error"
    body = json.loads(Problem(503, REWORDED, code="mine").response("abc").body)
    assert body == {"status": 503, "title": STATUSES[503][0], "detail": REWORDED, "code": "mine", "request_id": "abc"}


@pytest.mark.parametrize(
    "error", [ConfigError(REWORDED, code="mine"), ImageError("it is empty.", name="a.png", code="image_empty")]
)
def test_errors_can_be_pickled(error: PatchwordError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


def test_a_note_is_a_text_with_a_code() -> None:
    note = Note("224 is assumed.", "image_size_assumed")
    assert json.dumps([note]) == '["224 is assumed."]'
    assert f"{note}" == "224 is assumed."
    for again in (pickle.loads(pickle.dumps(note)), copy.deepcopy(note), Note.from_json(note.to_json())):
        assert again == note
        assert again.code == note.code
    assert Note.from_json("of an earlier version").code == "note"


# ---- control flow: the words change, the codes stay


def test_stating_the_preprocessing_drops_the_note_of_what_was_assumed() -> None:
    assumed = Note(REWORDED, "preprocess_assumed")
    other = Note("Not on how images are prepared, but on labels.", "labels_assumed")
    made = patchword.checkpoints.Checkpoint(**{**vars(make_checkpoint()), "notes": (assumed, other)})
    stated = made.with_metadata(crop=0.5).with_metadata(crop=0.6)
    assert [note.code for note in stated.notes] == ["labels_assumed", "preprocess_stated"]


def test_exit_code_of_a_run_depends_on_unreadable_images(tmp_path: Path) -> None:
    note = Note("All images are fine: there is none that could not be read.", "note")
    assert print_train_result(TrainResult(tmp_path, {}, 1, 1, 1.0, tmp_path, (note,)), json=False) == 0
    assert print_train_result(TrainResult(tmp_path, {}, 1, 1, 1.0, tmp_path, (), num_unreadable=1), json=False) == 3


@pytest.mark.parametrize(
    ("error", "code", "kept"),
    [
        (ConfigError(REWORDED, code="ambiguous_class"), "ambiguous_class", True),
        (ConfigError("There may be classes, but not this one.", code="unknown_class"), "unknown_class", False),
    ],
)
def test_the_server_knows_an_ambiguous_class(
    error: ConfigError, code: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setattr(app, "find_class", find)
    with pytest.raises(Problem) as refused:
        app.resolve_class(types.SimpleNamespace(labels=("a", "b")), "a", None)  # type: ignore[arg-type]
    assert (refused.value.status, refused.value.code, str(error) in refused.value.detail) == (422, code, kept)


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (ImageError(REWORDED, code="image_too_large"), False),
        (ImageError("its text says max_pixels, and far more pixels.", code="image_damaged"), True),
    ],
)
def test_the_server_names_its_own_limit_of_pixels(
    error: ImageError, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> Image.Image:
        raise error

    monkeypatch.setattr(service, "decode", load)
    itself: Any = types.SimpleNamespace(preprocess=make_checkpoint().preprocess, limits=Limits(max_pixels=1234))
    found = service.Service.decode(itself, Upload("a.png", b""), False)
    assert isinstance(found, ImageError)
    assert found.code == error.code
    assert (found.reason == error.reason) is kept
    assert ("1,234" in found.reason) is not kept


def test_too_many_files_whatever_starlette_says(monkeypatch: pytest.MonkeyPatch) -> None:
    async def count(request: Request) -> JSONResponse:
        try:
            return JSONResponse(len(await read_uploads(request, Limits(max_files=2))))
        except Problem as problem:
            return problem.response()

    monkeypatch.setattr(MultiPartException, "__init__", lambda self, message: setattr(self, "message", REWORDED))
    client = TestClient(Starlette(routes=[Route("/", count, methods=["POST"])]))
    files = [("file", (f"{i}.png", b"x")) for i in range(5)]
    assert client.post("/", files=files[:2]).json() == 2
    for number in (3, 4, 5):
        assert client.post("/", files=files[:number]).json()["code"] == "too_many_images"
    fields = client.post("/", files=files[:1], data={"a": "1", "b": "2", "c": "3"}).json()
    assert (fields["code"], fields["detail"]) == ("invalid_form", REWORDED)


def test_only_a_signal_condemns_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message may name a signal; only a process killed by one will fail again."""
    monkeypatch.setenv("PATCHWORD_CACHE", str(tmp_path))
    monkeypatch.setattr(trial, "_results", {})
    verdict = trial.run_trial("torch", "import sys; sys.exit('something about SIGILL')")
    assert not verdict.works
    assert verdict.signal == ""
    assert verdict.reason.endswith("SIGILL")
    trial._results.clear()
    assert trial.cached_result("torch") is None
    verdict = trial.run_trial("torch", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    trial._results.clear()
    assert verdict.signal == "SIGILL"
    assert trial.cached_result("torch") == verdict


@pytest.mark.parametrize(
    ("error", "code"),
    [(pickle.UnpicklingError(REWORDED), "unsafe_pickle"), (RuntimeError("Unsupported"), "invalid_checkpoint")],
)
def test_a_pickle_that_torch_refuses(
    error: Exception, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise error

    torch.save({"a": torch.ones(2), "object": types.SimpleNamespace()}, tmp_path / "m.pth")
    with pytest.raises(CheckpointError) as refused:
        read_tensors(tmp_path / "m.pth")
    assert refused.value.code == "unsafe_pickle"
    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(CheckpointError) as refused:
        read_tensors(tmp_path / "m.pth")
    assert refused.value.code == code


def test_errors_name_the_sample() -> None:
    with pytest.raises(ImageError) as error:
        decode_image(b"junk", "<bytes>.tar:0.png", "RGB", None)
    assert error.value.code == "image_unsupported"
    assert str(error.value) == f"Cannot read <bytes>.tar:0.png: {error.value.reason}"


def test_a_study_records_divergence_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(studies, "train", fail)
    arguments: Any = (
        little_study(),
        Cell("ViT", "none", BASE),
        0,
        tmp_path,
        {"seconds_per_run": 1.0, "steps": 1},
        time.monotonic,
    )
    error = TrainingError(REWORDED, code="not_finite")
    assert studies.run_cell(*arguments)["diverged"] == REWORDED
    error = TrainingError("NaN is not to blame.")
    with pytest.raises(TrainingError):
        studies.run_cell(*arguments)


# ---- exit codes, of real processes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model", color_checkpoint())
    Image.new("RGB", (20, 30), "red").save(tmp_path / "red.png")
    return tmp_path / "model"


@pytest.mark.slow
def test_exit_codes_of_requests(model: Path) -> None:
    good, missing = model.parent / "red.png", model.parent / "missing.png"
    done = run("predict", model, good)
    assert done.returncode == 0, done.stderr
    for wrong in (("predict", model.parent, good), ("predict", model, good, "--topp", 1), ("predict",), ("fly",)):
        refused = run(*wrong)
        assert refused.returncode == 2, wrong
        assert refused.stderr, wrong
        assert "Traceback" not in refused.stderr, wrong
    partly = run("predict", model, good, missing)
    assert partly.returncode == 3
    assert str(missing) in partly.stderr
    assert "Traceback" not in partly.stderr
    assert "red.png" in partly.stdout


@pytest.mark.slow
def test_an_internal_error_is_exit_code_1(model: Path, tmp_path: Path) -> None:
    """With a traceback, for the bug report."""
    broken = "import patchword.inference.inputs as p\np.resolve_images = lambda images: 1 / 0\n"
    (tmp_path / "sitecustomize.py").write_text(broken)
    places = os.pathsep.join([str(tmp_path), str(SOURCE.parent)])
    failed = run("predict", model, tmp_path / "red.png", PYTHONPATH=places)
    assert failed.returncode == 1
    assert "ZeroDivisionError" in failed.stderr
    assert not failed.stdout


@pytest.mark.slow
def test_a_training_run_with_unreadable_images_is_exit_code_3(tmp_path: Path) -> None:
    for i in range(12):
        path = tmp_path / f"data/{'ab'[i % 2]}/{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), 20 * i).save(path)
    (tmp_path / "data/a/0.png").write_bytes(b"junk")
    flags = ("--model.image-size", 8, "--model.patch-size", 4, "--steps", 4, "--batch-size", 8, "--json")
    done = run("train", "quickstart", "--data.source", tmp_path / "data", *flags, "--out", tmp_path / "run")
    assert done.returncode == 3, done.stderr
    assert any("0.png" in note for note in json.loads(done.stdout)["notes"])
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_exit_code_128_and_its_number(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "patchword", "train", "quickstart", "--steps", "1000000", "--out", "run"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        metrics, end = tmp_path / "run/metrics.jsonl", time.monotonic() + 120
        # A row: the first step is made, so the handlers of the run are installed.
        while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(number)
        stderr = process.communicate(timeout=120)[1]
    assert process.returncode == 128 + number, stderr
    assert "patchword resume" in stderr
    assert "Traceback" not in stderr


@pytest.mark.slow
def test_closed_pipe_is_exit_code_141(model: Path) -> None:
    """As in `patchword predict ... | head -0`: no traceback."""
    command = [sys.executable, "-m", "patchword", "predict", str(model), str(model.parent / "red.png")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        stderr = process.stderr.read()
    assert process.returncode == 128 + signal.SIGPIPE
    assert not stderr


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        ({}, "pip install 'patchword[serve]'"),
        (
            {"url": "file:///clone", "dir_info": {}},
            "in the clone of patchword, pip install -c constraints.txt '.[serve]'",
        ),
        (
            {"url": "https://host/me/patchword", "vcs_info": {"vcs": "git"}},
            "pip install 'patchword[serve] @ git+https://host/me/patchword'",
        ),
    ],
)
def test_install_line_of_an_extra(origin: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "install_origin", lambda: origin)
    assert errors.how_to_install("serve") == line
