"""Whatever fails while a checkpoint is saved, and whatever damages it later, a whole one is loaded or none."""

import json
import random
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.faulty_save import NEW, content
from helpers.runs import Nursery, at, end_of, go_on, leftovers, shared_nursery, tiny, write_recipe
from patchword.errors import CheckpointError
from patchword.training.checkpointing import CheckpointStore, read_training_checkpoint

SCRIPT = Path(__file__).parents[1] / "helpers/faulty_save.py"
SITUATIONS = ("usual", "first", "damaged")  # two checkpoints and litter; none; two, and a damaged one of the same step


@pytest.fixture(scope="module")
def nursery() -> Nursery:
    return shared_nursery()


def make_run(run: Path, situation: str) -> None:
    run.mkdir()
    if situation == "first":
        return
    store = CheckpointStore(run, keep_last=2)
    for step in (10, 20):
        store.save(*content(step))
    if situation == "usual":
        shutil.copytree(store.path(10), store.folder / ".making-step-00000015")
    else:
        shutil.copytree(store.path(20), store.path(NEW))
        (store.path(NEW) / "state.json").write_bytes(b"{}")


def check_loaded(run: Path, allowed: set[int | None]) -> None:
    """One of these steps is loaded, and is exactly what was saved then."""
    found = CheckpointStore(run, keep_last=2).load()
    assert (found.snapshot.step if found else None) in allowed
    if found is not None:
        snapshot, model = found.snapshot, found.model
        saved, checkpoint = content(snapshot.step)
        assert replace(snapshot, tensors={}) == replace(saved, tensors={})
        torch.testing.assert_close(snapshot.tensors, saved.tensors, rtol=0, atol=0)
        torch.testing.assert_close(model, checkpoint.tensors, rtol=0, atol=0)


def check_survival(run: Path, situation: str) -> None:
    """The old checkpoint or the new one is whole, nothing else passes for one, and the next save needs no help."""
    check_loaded(run, {None if situation == "first" else 20, NEW})
    store = CheckpointStore(run, keep_last=2)
    found = store.load()
    assert found is None or situation == "damaged" or found.notes == ()
    for step in store.steps():
        if (situation, step) != ("damaged", NEW):
            read_training_checkpoint(store.path(step))
    store.save(*content(NEW + 10))
    check_loaded(run, {NEW + 10})
    assert leftovers(run) == []


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_kill_at_every_call_of_a_save(nursery: Nursery, tmp_path: Path, situation: str) -> None:
    make_run(tmp_path / "run", situation)
    shutil.copytree(tmp_path / "run", tmp_path / "clean")
    child = nursery.run(SCRIPT, tmp_path / "clean")
    assert child.wait() == 0, child.output()
    calls = child.output().split()
    assert len(calls) > 25
    assert {"mkdir", "open", "write", "fsync", "rename"} <= set(calls)
    check_loaded(tmp_path / "clean", {NEW})
    for number in range(len(calls)):
        run = tmp_path / f"run-{number}"
        shutil.copytree(tmp_path / "run", run)
        assert nursery.run(SCRIPT, run, str(number)).wait() == -signal.SIGKILL
        check_survival(run, situation)


@pytest.mark.parametrize(
    ("situation", "kind"),
    [("usual", "ENOSPC"), ("usual", "EIO"), ("usual", "gone"), ("first", "ENOSPC"), ("damaged", "EIO")],
)
def test_an_error_at_every_call_of_a_save(nursery: Nursery, tmp_path: Path, situation: str, kind: str) -> None:
    make_run(tmp_path / "run", situation)
    child = nursery.run(SCRIPT, tmp_path / "run", kind)
    assert child.wait() == 0, child.output()
    messages = [json.loads(line) for line in child.output().splitlines()]
    assert len(messages) > 25
    assert messages.count("nothing") <= 1
    for number, message in enumerate(messages):
        run = tmp_path / f"run-{number}"
        if message == "nothing":  # an error that changed nothing, such as at the making of a folder that is there
            check_loaded(run, {NEW})
        else:
            check_message(message, run, kind)
        check_survival(run, situation)


def check_message(said: str, run: Path, kind: str) -> None:
    """It names the checkpoint, the reason, what is intact and what to do."""
    store = CheckpointStore(run, 2)
    reason = "No space left on device" if kind == "ENOSPC" else "Input/output error"
    assert f"{store.path(NEW)} failed ({reason})" in said
    found = store.load()
    intact = f"The checkpoint of step {found.snapshot.step} is intact." if found else "No earlier checkpoint is intact."
    if kind != "gone":  # then nothing can be read, either
        assert intact in said
    assert f"patchword resume {run}" in said


def test_no_damage_is_loaded(tmp_path: Path) -> None:
    """1,000 flipped bits and truncations, each alone: the file is named, and the checkpoint before is loaded."""
    chance = random.Random(0)
    make_run(tmp_path / "run", "usual")
    store = CheckpointStore(tmp_path / "run", keep_last=2)
    store.save(*content(NEW))
    files = sorted(store.path(NEW).iterdir())
    assert [f.name for f in files] == ["model.json", "model.safetensors", "state.json", "state.safetensors"]
    for number in range(1000):
        path = files[number % 4]
        whole = path.read_bytes()
        if number % 8 < 4:
            damaged = bytearray(whole)
            damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        else:
            damaged = bytearray(whole[: chance.randrange(len(whole))])
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            read_training_checkpoint(store.path(NEW))
        if number % 20 < 4:  # what follows from that is always the same, and takes longer
            found = store.load()
            assert found is not None
            assert found.snapshot.step == 20
            assert len(found.notes) == 1
            assert str(path) in found.notes[0]
        path.write_bytes(whole)
    check_loaded(tmp_path / "run", {NEW})


def test_a_missing_file_is_damage_too(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "usual")
    store = CheckpointStore(tmp_path / "run", keep_last=2)
    for path in sorted(store.path(20).iterdir()):
        whole = path.read_bytes()
        path.unlink()
        found = store.load()
        path.write_bytes(whole)
        assert found is not None
        assert found.snapshot.step == 10
        assert str(path) in found.notes[0]


def test_all_damaged_is_an_error_that_names_all(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "usual")
    store = CheckpointStore(tmp_path / "run", keep_last=2)
    for step, name in ((10, "state.safetensors"), (20, "model.json")):
        path = store.path(step) / name
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as caught:
        store.load()
    for part in ("step-00000010/state.safetensors", "step-00000020/model.json", "No checkpoint in"):
        assert part in str(caught.value)


def test_damaged_later_checkpoints_do_not_crowd_out_new_ones(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "usual")
    store = CheckpointStore(tmp_path / "run", keep_last=3)
    for step in (40, 50):
        store.save(*content(step))
    store = CheckpointStore(tmp_path / "run", keep_last=2)
    for step in (40, 50):
        (store.path(step) / "state.json").write_bytes(b"{}")
    found = store.load()
    assert found is not None
    assert found.snapshot.step == 20
    store.save(*content(NEW))
    assert store.steps() == [NEW, 20]


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    """Saving it again would have to remove it first: for a moment there would be none."""
    make_run(tmp_path / "run", "usual")
    store = CheckpointStore(tmp_path / "run", keep_last=1)
    store.load()
    before = (store.path(20) / "state.json").stat()
    store.save(*content(20))
    assert (store.path(20) / "state.json").stat() == before


def test_a_damaged_best_is_the_best_no_more(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "usual")
    store = CheckpointStore(tmp_path / "run", keep_last=2)
    snapshot, model = content(NEW)
    store.save(replace(snapshot, best={"kind": "val", "step": 10, "top1": 0.9}), model)
    assert store.steps() == [NEW, 20, 10]
    found = store.load()
    assert found is not None
    assert found.snapshot.best is not None
    assert found.notes == ()
    weights = store.path(10) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    found = store.load()
    assert found is not None
    assert found.snapshot.step == NEW
    assert found.snapshot.best is None
    assert str(weights) in found.notes[0]


STEPS = 40


def started(nursery: Nursery, folder: Path) -> tuple[str, Path]:
    """A run that was stopped after its second checkpoint: that of an evaluation, and that of the stop."""
    recipe, run = write_recipe(folder / "recipe.py", tiny(steps=STEPS, save_every=0.05)), folder / "run"
    child = go_on(nursery, recipe, run, **at(STEPS - 10, signal.SIGTERM))
    assert child.wait() == 143, child.output()
    assert len(list((run / "checkpoints").glob("step-*"))) >= 2
    return recipe, run


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("undisturbed")
    child = go_on(nursery, write_recipe(folder / "recipe.py", tiny(steps=STEPS, save_every=3600.0)), folder / "run")
    assert child.wait() == 0, child.output()
    return end_of(folder / "run", STEPS)


def test_a_run_passes_over_a_damaged_checkpoint(nursery: Nursery, undisturbed: dict, tmp_path: Path) -> None:
    _, run = started(nursery, tmp_path)
    damaged = CheckpointStore(run, 2).path(CheckpointStore(run, 2).steps()[0]) / "state.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    child = nursery.run("resume", run)
    assert child.wait() == 0, child.output()
    assert f"{damaged} is damaged" in child.output()
    assert end_of(run, STEPS) == undisturbed


def test_what_kills_have_left_goes(nursery: Nursery, undisturbed: dict, tmp_path: Path) -> None:
    """Also where no save follows that would tidy up: this run was killed after its last."""
    recipe, run = write_recipe(tmp_path / "recipe.py", tiny(steps=STEPS)), tmp_path / "run"
    child = go_on(nursery, recipe, run, **at("finish"))
    assert child.wait() == -signal.SIGKILL
    assert (run / f"checkpoints/step-{STEPS:08d}").exists()
    (run / "model.json").unlink()  # that is what says that it is finished
    for name in (".report.html.x1y2", "checkpoints/.removing-step-00000010", "faults/.step-00000003.x1y2"):
        (run / name / "inner").mkdir(parents=True)
    for name in (".model.safetensors.part", ".split.json.part", "faults/.step-00000003.x1y2/inner/file"):
        (run / name).touch()
    child = nursery.run("resume", run)
    assert child.wait() == 0, child.output()
    assert leftovers(run) == []
    assert end_of(run, STEPS) == undisturbed


def test_lost_rows_do_not_stop_a_run(nursery: Nursery, undisturbed: dict, tmp_path: Path) -> None:
    """metrics.jsonl that a crash of the machine has cut short: what is left of it stays, the run goes on."""
    _, run = started(nursery, tmp_path)
    metrics = run / "metrics.jsonl"
    left = metrics.read_bytes()[:700]
    metrics.write_bytes(left)
    child = nursery.run("resume", run)
    assert child.wait() == 0, child.output()
    assert metrics.read_bytes().startswith(left[: left.rfind(b"\n") + 1] + b'{"kind"')
    assert end_of(run, STEPS)["state"] == undisturbed["state"]


@pytest.mark.parametrize("room", [1000, 100_000])
def test_a_full_disk_is_told_and_survived(nursery: Nursery, undisturbed: dict, tmp_path: Path, room: int) -> None:
    """A real refusal by the kernel: files may not grow beyond `room` bytes, too few for rows, or for a checkpoint."""
    limited = tmp_path / "limited.py"
    limited.write_text(
        "import resource, sys\nfrom patchword.cli.main import main\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))\nmain(sys.argv[1:])\n"
    )
    _, run = started(nursery, tmp_path)
    step = CheckpointStore(run, 2).steps()[0]
    child = nursery.run(limited, "resume", run)
    assert child.wait() == 2, child.output()
    assert "File too large" in child.output()
    assert "Traceback" not in child.output()
    assert f"patchword resume {run}" in child.output()
    if room > 1000:
        assert f"The checkpoint of step {step} is intact" in child.output()
    assert CheckpointStore(run, 2).steps()[0] == step
    child = nursery.run("resume", run)
    assert child.wait() == 0, child.output()
    assert end_of(run, STEPS) == undisturbed
    assert leftovers(run) == []
