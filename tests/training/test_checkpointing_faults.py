"""After a failed save or later damage, an intact checkpoint is loaded or none."""

import errno
import json
import os
import random
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.faulty_save import NEW_STEP, make_snapshot
from helpers.runs import (
    ForkServer,
    final_state,
    leftovers,
    shared_fork_server,
    signal_env,
    start_or_resume,
    tiny_config,
    write_recipe,
)
from patchword.errors import CheckpointError
from patchword.training.checkpointing import CheckpointStore, read_training_checkpoint

FAULTY_SAVE = Path(__file__).parents[1] / "helpers/faulty_save.py"
# Two checkpoints and leftovers of a killed save; no checkpoint; two checkpoints and a damaged one of the new step.
CASES = ("leftovers", "empty", "damaged")


@pytest.fixture(scope="module")
def fork_server() -> ForkServer:
    return shared_fork_server()


def make_run(run: Path, case: str) -> None:
    run.mkdir()
    if case == "empty":
        return
    store = CheckpointStore(run, keep_last=2)
    for step in (10, 20):
        store.save(*make_snapshot(step))
    if case == "leftovers":
        shutil.copytree(store.path(10), store.folder / ".making-step-00000015")
    else:
        shutil.copytree(store.path(20), store.path(NEW_STEP))
        (store.path(NEW_STEP) / "state.json").write_bytes(b"{}")


def check_loaded(run: Path, allowed_steps: set[int | None]) -> None:
    """Check that one of these steps is loaded, exactly as it was saved."""
    loaded = CheckpointStore(run, keep_last=2).load()
    assert (loaded.snapshot.step if loaded else None) in allowed_steps
    if loaded is not None:
        snapshot, model = loaded.snapshot, loaded.model
        saved, checkpoint = make_snapshot(snapshot.step)
        assert replace(snapshot, tensors={}) == replace(saved, tensors={})
        torch.testing.assert_close(snapshot.tensors, saved.tensors, rtol=0, atol=0)
        torch.testing.assert_close(model, checkpoint.tensors, rtol=0, atol=0)


def check_store_is_usable(run: Path, case: str) -> None:
    """Check that the old or the new checkpoint is loaded, that all others are intact, and that the next save works."""
    check_loaded(run, {None if case == "empty" else 20, NEW_STEP})
    store = CheckpointStore(run, keep_last=2)
    loaded = store.load()
    assert loaded is None or case == "damaged" or loaded.notes == ()
    for step in store.steps():
        if (case, step) != ("damaged", NEW_STEP):
            read_training_checkpoint(store.path(step))
    store.save(*make_snapshot(NEW_STEP + 10))
    check_loaded(run, {NEW_STEP + 10})
    assert leftovers(run) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_save_survives_kill_at_every_system_call(fork_server: ForkServer, tmp_path: Path, case: str) -> None:
    make_run(tmp_path / "run", case)
    shutil.copytree(tmp_path / "run", tmp_path / "clean")
    child = fork_server.start(FAULTY_SAVE, tmp_path / "clean")
    assert child.wait() == 0, child.output()
    calls = child.output().split()
    assert len(calls) > 25
    assert {"mkdir", "open", "write", "fsync", "rename"} <= set(calls)
    check_loaded(tmp_path / "clean", {NEW_STEP})
    for number in range(len(calls)):
        run = tmp_path / f"run-{number}"
        shutil.copytree(tmp_path / "run", run)
        assert fork_server.start(FAULTY_SAVE, run, str(number)).wait() == -signal.SIGKILL
        check_store_is_usable(run, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("leftovers", "ENOSPC"),
        ("leftovers", "EIO"),
        ("leftovers", "disconnected"),
        ("empty", "ENOSPC"),
        ("damaged", "EIO"),
    ],
)
def test_save_survives_error_at_every_system_call(
    fork_server: ForkServer, tmp_path: Path, case: str, kind: str
) -> None:
    make_run(tmp_path / "run", case)
    child = fork_server.start(FAULTY_SAVE, tmp_path / "run", kind)
    assert child.wait() == 0, child.output()
    errors = [json.loads(line) for line in child.output().splitlines()]
    assert len(errors) > 25
    assert errors.count(None) <= 1
    for number, error in enumerate(errors):
        run = tmp_path / f"run-{number}"
        if error is None:  # the failed call had no effect, such as creating a directory that exists
            check_loaded(run, {NEW_STEP})
        else:
            check_save_error(*error, run, kind)
        check_store_is_usable(run, case)


def check_save_error(code: str, message: str, run: Path, kind: str) -> None:
    """Check that it names the checkpoint, the reason, the intact checkpoint and the command to continue."""
    assert code == "checkpoint_not_saved"
    store = CheckpointStore(run, 2)
    assert str(store.path(NEW_STEP)) in message
    assert os.strerror(errno.ENOSPC if kind == "ENOSPC" else errno.EIO) in message
    loaded = store.load()
    if kind != "disconnected":  # in which case no checkpoint can be read
        assert re.findall(r"\bstep (\d+)", message) == ([str(loaded.snapshot.step)] if loaded else [])
    assert f"patchword resume {run}" in message


def test_damaged_checkpoint_is_never_loaded(tmp_path: Path) -> None:
    """1,000 bit flips and truncations, one at a time: the file is named, and the previous checkpoint is loaded."""
    rng = random.Random(0)
    make_run(tmp_path / "run", "leftovers")
    store = CheckpointStore(tmp_path / "run", keep_last=2)
    store.save(*make_snapshot(NEW_STEP))
    files = sorted(store.path(NEW_STEP).iterdir())
    assert [f.name for f in files] == ["model.json", "model.safetensors", "state.json", "state.safetensors"]
    for number in range(1000):
        path = files[number % 4]
        original = path.read_bytes()
        if number % 8 < 4:
            damaged = bytearray(original)
            damaged[rng.randrange(len(original))] ^= 1 << rng.randrange(8)
        else:
            damaged = bytearray(original[: rng.randrange(len(original))])
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            read_training_checkpoint(store.path(NEW_STEP))
        if number % 20 < 4:  # only sometimes, because it takes longer and depends on the error alone
            loaded = store.load()
            assert loaded is not None
            assert loaded.snapshot.step == 20
            assert [note.code for note in loaded.notes] == ["checkpoint_damaged"]
            assert str(path) in loaded.notes[0]
        path.write_bytes(original)
    check_loaded(tmp_path / "run", {NEW_STEP})


def test_checkpoint_with_missing_file_is_skipped(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "leftovers")
    store = CheckpointStore(tmp_path / "run", keep_last=2)
    for path in sorted(store.path(20).iterdir()):
        original = path.read_bytes()
        path.unlink()
        loaded = store.load()
        path.write_bytes(original)
        assert loaded is not None
        assert loaded.snapshot.step == 10
        assert loaded.notes[0].code == "checkpoint_damaged"
        assert str(path) in loaded.notes[0]


def test_load_names_all_files_if_every_checkpoint_is_damaged(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "leftovers")
    store = CheckpointStore(tmp_path / "run", keep_last=2)
    for step, name in ((10, "state.safetensors"), (20, "model.json")):
        path = store.path(step) / name
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as error:
        store.load()
    assert error.value.code == "checkpoints_damaged"
    for name in ("step-00000010/state.safetensors", "step-00000020/model.json"):
        assert str(store.folder / name) in str(error.value)


def test_save_removes_damaged_later_checkpoints(tmp_path: Path) -> None:
    """Otherwise they would count as the last ones, and new checkpoints would be removed."""
    make_run(tmp_path / "run", "leftovers")
    store = CheckpointStore(tmp_path / "run", keep_last=3)
    for step in (40, 50):
        store.save(*make_snapshot(step))
    store = CheckpointStore(tmp_path / "run", keep_last=2)
    for step in (40, 50):
        (store.path(step) / "state.json").write_bytes(b"{}")
    loaded = store.load()
    assert loaded is not None
    assert loaded.snapshot.step == 20
    store.save(*make_snapshot(NEW_STEP))
    assert store.steps() == [NEW_STEP, 20]


def test_loaded_step_is_not_saved_again(tmp_path: Path) -> None:
    """Replacing it would remove it first, and for a moment there would be no checkpoint."""
    make_run(tmp_path / "run", "leftovers")
    store = CheckpointStore(tmp_path / "run", keep_last=1)
    store.load()
    before = (store.path(20) / "state.json").stat()
    store.save(*make_snapshot(20))
    assert (store.path(20) / "state.json").stat() == before


def test_load_drops_damaged_best_checkpoint(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "leftovers")
    store = CheckpointStore(tmp_path / "run", keep_last=2)
    snapshot, model = make_snapshot(NEW_STEP)
    store.save(replace(snapshot, best={"kind": "val", "step": 10, "top1": 0.9}), model)
    assert store.steps() == [NEW_STEP, 20, 10]
    loaded = store.load()
    assert loaded is not None
    assert loaded.snapshot.best is not None
    assert loaded.notes == ()
    weights = store.path(10) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    loaded = store.load()
    assert loaded is not None
    assert loaded.snapshot.step == NEW_STEP
    assert loaded.snapshot.best is None
    assert loaded.notes[0].code == "best_checkpoint_damaged"
    assert str(weights) in loaded.notes[0]


# ---- runs that are resumed

STEPS = 40


def start_and_stop_run(fork_server: ForkServer, folder: Path) -> Path:
    """Start a run and stop it with two checkpoints, of an evaluation and of the stop; return its directory."""
    run = folder / "run"
    recipe = write_recipe(folder / "recipe.py", tiny_config(steps=STEPS, save_every=0.05))
    child = start_or_resume(fork_server, recipe, run, **signal_env(STEPS - 10, signal.SIGTERM))
    assert child.wait() == 143, child.output()
    assert len(list((run / "checkpoints").glob("step-*"))) >= 2
    return run


@pytest.fixture(scope="module")
def uninterrupted_state(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The final state of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    recipe = write_recipe(folder / "recipe.py", tiny_config(steps=STEPS, save_every=3600.0))
    child = start_or_resume(fork_server, recipe, folder / "run")
    assert child.wait() == 0, child.output()
    return final_state(folder / "run", STEPS)


@pytest.mark.slow
def test_resume_skips_damaged_checkpoint(fork_server: ForkServer, uninterrupted_state: dict, tmp_path: Path) -> None:
    run = start_and_stop_run(fork_server, tmp_path)
    store = CheckpointStore(run, 2)
    damaged = store.path(store.steps()[0]) / "state.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    child = fork_server.start("resume", run)
    assert child.wait() == 0, child.output()
    assert str(damaged) in child.output()
    snapshot, _ = read_training_checkpoint(store.path(STEPS))
    assert any(note.code == "checkpoint_damaged" and str(damaged) in note for note in snapshot.notes or ())
    assert final_state(run, STEPS) == uninterrupted_state


def test_resume_removes_leftovers_of_killed_processes(
    fork_server: ForkServer, uninterrupted_state: dict, tmp_path: Path
) -> None:
    """Here no save follows that would remove them: the run was killed after its last one."""
    recipe, run = write_recipe(tmp_path / "recipe.py", tiny_config(steps=STEPS)), tmp_path / "run"
    child = start_or_resume(fork_server, recipe, run, **signal_env("finish"))
    assert child.wait() == -signal.SIGKILL
    assert (run / f"checkpoints/step-{STEPS:08d}").exists()
    (run / "model.json").unlink()  # this file marks the run as finished
    for name in (".report.html.x1y2", "checkpoints/.removing-step-00000010", "faults/.step-00000003.x1y2"):
        (run / name / "inner").mkdir(parents=True)
    for name in (".model.safetensors.part", ".split.json.part", "faults/.step-00000003.x1y2/inner/file"):
        (run / name).touch()
    child = fork_server.start("resume", run)
    assert child.wait() == 0, child.output()
    assert leftovers(run) == []
    assert final_state(run, STEPS) == uninterrupted_state


def test_resume_continues_with_truncated_metrics(
    fork_server: ForkServer, uninterrupted_state: dict, tmp_path: Path
) -> None:
    """After a machine crash metrics.jsonl may be shorter; its remaining complete rows are kept."""
    run = start_and_stop_run(fork_server, tmp_path)
    metrics = run / "metrics.jsonl"
    remaining = metrics.read_bytes()[:700]
    metrics.write_bytes(remaining)
    child = fork_server.start("resume", run)
    assert child.wait() == 0, child.output()
    assert metrics.read_bytes().startswith(remaining[: remaining.rfind(b"\n") + 1] + b'{"kind"')
    assert final_state(run, STEPS)["files"] == uninterrupted_state["files"]


@pytest.mark.slow
@pytest.mark.parametrize("max_bytes", [1000, 100_000])
def test_full_disk_is_reported_and_run_can_resume(
    fork_server: ForkServer, uninterrupted_state: dict, tmp_path: Path, max_bytes: int
) -> None:
    """The kernel limits the size of files: to too few bytes for metrics.jsonl, or only for a checkpoint."""
    limited = tmp_path / "limited.py"
    limited.write_text(
        "import resource, sys\nfrom patchword.cli.main import main\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({max_bytes}, {max_bytes}))\nmain(sys.argv[1:])\n"
    )
    run = start_and_stop_run(fork_server, tmp_path)
    step = CheckpointStore(run, 2).steps()[0]
    if max_bytes == 1000:  # a row of metrics.jsonl is written before the next checkpoint
        config = json.loads((run / "config.json").read_text())
        config["config"]["save_every"] = 3600.0
        (run / "config.json").write_text(json.dumps(config))
    child = fork_server.start(limited, "resume", run)
    assert child.wait() == 2, child.output()
    assert "Traceback" not in child.output()
    message = child.output().splitlines()[-1]
    assert os.strerror(errno.EFBIG) in message
    assert f"patchword resume {run}" in message
    if max_bytes > 1000:
        assert child.error_code() == "checkpoint_not_saved"
        assert re.search(rf"\bstep {step}\b", message)
    else:
        assert str(run / "metrics.jsonl") in message
    assert CheckpointStore(run, 2).steps()[0] == step
    child = fork_server.start("resume", run)
    assert child.wait() == 0, child.output()
    assert final_state(run, STEPS) == uninterrupted_state
    assert leftovers(run) == []
