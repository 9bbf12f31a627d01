"""FSDP: several processes that share one model train like one process, and resume in any number and mode."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.runs import (
    ForkServer,
    assert_exit_codes,
    final_state,
    free_port,
    leftovers,
    rows,
    shared_fork_server,
    start_ranks,
    tiny_config,
    wait_until,
    write_recipe,
)
from patchword.checkpoints import read_checkpoint
from patchword.checkpoints.sharded_tensors import SHARD_PATTERN
from patchword.config import Config, DistillConfig, OptimConfig
from patchword.errors import CheckpointError, ConfigError
from patchword.training import resume
from patchword.training.checkpointing import MANIFEST_FILE, CheckpointStore, read_training_checkpoint
from patchword.training.run_dir import read_config

STEPS = 20
SHARDED_MODEL = Path(__file__).parents[1] / "helpers/sharded_model.py"


@pytest.fixture(scope="module")
def fork_server() -> ForkServer:
    return shared_fork_server()


def make_config(**changes: Any) -> Config:
    """No number of processes above two divides the batch of 50 evenly, and some widths are not divisible either."""
    model = tiny_config().model.replace(
        embed_dim=30, num_heads=3, mlp_dim=50, dropout=0.0, attention_dropout=0.0, drop_path=0.0
    )
    base: dict[str, Any] = {"model": model, "num_threads": 1, "batch_size": 100, "steps": STEPS, "eval_every": 0.4}
    return tiny_config(**{**base, "save_every": 3600.0, **changes})


def make_lora_config(teacher: str) -> Config:
    """LoRA, SAM, gradient clipping, a distillation head, recomputed blocks, SGD, and no EMA."""
    model = make_config().model.replace(distillation=True, class_token=True, pooling="class", grad_checkpointing=True)
    optim = OptimConfig(name="sgd", lr=0.05, sam_rho=0.05, clip_grad_norm=1.0)
    distill = DistillConfig(teacher=teacher, kind="soft")
    return make_config(model=model, lora_rank=2, optim=optim, distill=distill, ema=0.0)


Reference = Callable[[str], Path]


@pytest.fixture(scope="module")
def reference(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Function that returns the run of one process with a kind of configuration; trained once."""
    runs: dict[str, Path] = {}

    def run(kind: str) -> Path:
        if kind not in runs:
            folder = tmp_path_factory.mktemp(kind)
            config = {
                "plain": make_config,
                "lora": lambda: make_lora_config(str(run("plain"))),
                "wise": lambda: make_config(init=str(run("plain")), wise_ft_alpha=0.5, freeze=("patch_embed",)),
            }[kind]()
            recipe = write_recipe(folder / "recipe.py", config)
            assert_exit_codes(start_ranks(fork_server, 1, recipe, folder / "run", folder / "log"), 0)
            runs[kind] = folder / "run"
        return runs[kind]

    return run


def write_sharded_recipe(like: Path, folder: Path) -> str:
    """Write a recipe that trains as the run `like` did, with FSDP."""
    folder.mkdir(exist_ok=True)
    return write_recipe(folder / "recipe.py", read_config(like).replace(parallel="fsdp"))


def train_sharded(server: ForkServer, world_size: int, like: Path, folder: Path) -> Path:
    """Train as the run `like` did, with FSDP."""
    recipe = write_sharded_recipe(like, folder)
    assert_exit_codes(start_ranks(server, world_size, recipe, folder / "run", folder / "log"), 0)
    return folder / "run"


def check_same_losses(run: Path, other: Path) -> None:
    pairs = list(zip(rows(run), rows(other), strict=True))
    assert len(pairs) > STEPS // 2
    for actual, expected in pairs:
        name = "loss" if actual["kind"] == "train" else "nll"
        assert (actual["kind"], actual["step"]) == (expected["kind"], expected["step"])
        assert actual[name] == pytest.approx(expected[name], abs=1e-5)
        if actual["kind"] == "train":
            assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def read_samples(log: Path) -> bytes:
    """Return the logged samples of all processes, by position."""
    lines = [line for path in sorted(log.parent.glob(f"{log.name}.*")) for line in path.read_text().splitlines()]
    return "\n".join(sorted(lines, key=lambda line: int(line.split()[0]))).encode()


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "kind"), [(2, "plain"), (3, "plain"), (4, "plain"), (3, "lora"), (2, "wise")])
def test_losses_and_samples_match_single_process(
    fork_server: ForkServer, reference: Reference, tmp_path: Path, world_size: int, kind: str
) -> None:
    expected = reference(kind)
    run = train_sharded(fork_server, world_size, expected, tmp_path)
    check_same_losses(run, expected)
    assert read_samples(tmp_path / "log") == read_samples(expected.with_name("log"))
    actual_model, expected_model = load_file(run / "model.safetensors"), load_file(expected / "model.safetensors")
    torch.testing.assert_close(actual_model, expected_model, atol=1e-4, rtol=1e-3)
    assert leftovers(run) == []
    if kind == "plain":
        shards = sorted((run / "checkpoints" / f"step-{STEPS:08d}").glob(SHARD_PATTERN))
        assert len(shards) == world_size
        assert not [path for path in run.rglob("*") if path.suffix in (".metadata", ".distcp", ".pt")], "no pickles"


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3])
def test_uneven_batches_match_single_process_with_ddp(
    fork_server: ForkServer, reference: Reference, tmp_path: Path, world_size: int
) -> None:
    expected = reference("plain")
    recipe = expected.with_name("recipe.py")
    children = start_ranks(fork_server, world_size, str(recipe), tmp_path / "run", tmp_path / "log")
    assert_exit_codes(children, 0)
    check_same_losses(tmp_path / "run", expected)
    assert read_samples(tmp_path / "log") == read_samples(expected.with_name("log"))


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "kind"), [(2, "plain"), (3, "plain"), (4, "lora")])
def test_killed_run_resumes_bit_identically(
    fork_server: ForkServer, reference: Reference, tmp_path: Path, world_size: int, kind: str
) -> None:
    """One process is killed at step 14; the last checkpoint is that of an evaluation before."""
    expected = train_sharded(fork_server, world_size, reference(kind), tmp_path / "whole")
    run, recipe = tmp_path / "run", str(tmp_path / "whole/recipe.py")
    children = start_ranks(fork_server, world_size, recipe, run, tmp_path / "first", "-1", "-1", "14")
    pause_marker = Path(f"{tmp_path / 'first'}.0.paused")
    assert wait_until(pause_marker.exists)
    assert any((run / "checkpoints").glob("step-*"))
    assert children[-1].kill() == -signal.SIGKILL
    pause_marker.unlink()
    wait_until(lambda: all(child.has_exited() for child in children[:-1]), 60)
    assert {child.kill() for child in children[:-1]} <= {1, -signal.SIGKILL}
    assert_exit_codes(start_ranks(fork_server, world_size, recipe, run, tmp_path / "log"), 0)
    assert final_state(run, STEPS) == final_state(expected, STEPS)
    assert leftovers(run) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "lora"])
def test_resumes_in_any_number_of_processes_and_either_mode(
    fork_server: ForkServer, reference: Reference, tmp_path: Path, kind: str
) -> None:
    """FSDP in two processes, in three, DDP in two, FSDP in four, one process: losses stay those of one process."""
    expected = reference(kind)
    recipe, run = write_sharded_recipe(expected, tmp_path), tmp_path / "run"
    plan = [(2, "fsdp", "5"), (3, "fsdp", "9"), (2, "ddp", "13"), (4, "fsdp", "17"), (1, "fsdp", "-1")]
    for number, (world_size, parallel, stop) in enumerate(plan):
        log = tmp_path / f"log-{number}"
        children = start_ranks(fork_server, world_size, recipe, run, log, stop, PARALLEL=parallel)
        assert_exit_codes(children, 143 if stop != "-1" else 0)
    check_same_losses(run, expected)
    samples = [read_samples(tmp_path / f"log-{number}") for number in range(len(plan))]
    assert b"\n".join(samples) == read_samples(expected.with_name("log")), "none skipped, none repeated"


@pytest.fixture(scope="module")
def stopped_run(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes with FSDP that was stopped after step 12."""
    folder = tmp_path_factory.mktemp("stopped")
    recipe = write_recipe(folder / "recipe.py", make_config(parallel="fsdp"))
    assert_exit_codes(start_ranks(fork_server, 2, recipe, folder / "run", folder / "log", "12"), 143)
    return folder / "run"


@pytest.mark.slow
def test_state_of_another_number_of_processes_is_bit_identical(
    fork_server: ForkServer, stopped_run: Path, tmp_path: Path
) -> None:
    """sharded_model.py compares every tensor that it restores with the whole checkpoint, and saves it again."""
    expected = read_training_checkpoint(stopped_run / "checkpoints/step-00000012")
    for world_size in (1, 3, 4):
        run = tmp_path / f"run-{world_size}"
        shutil.copytree(stopped_run, run)
        children = start_ranks(fork_server, world_size, "restore", run, script=SHARDED_MODEL)
        assert_exit_codes(children, 0)
        snapshot, model = read_training_checkpoint(run / "checkpoints/step-00000012")
        assert snapshot.tensors.keys() == expected[0].tensors.keys()
        assert all(torch.equal(tensor, expected[0].tensors[name]) for name, tensor in snapshot.tensors.items())
        assert all(torch.equal(tensor, expected[1][name]) for name, tensor in model.items())


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["bit", "missing", "manifest", "no manifest"])
def test_damaged_shard_is_named_and_earlier_checkpoint_used(
    fork_server: ForkServer, stopped_run: Path, tmp_path: Path, damage: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped_run, run)
    last = run / "checkpoints/step-00000012"
    victim = last / MANIFEST_FILE if "manifest" in damage else sorted(last.glob(SHARD_PATTERN))[1]
    if damage in ("missing", "no manifest"):
        victim.unlink()
    else:
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    loaded = CheckpointStore(run, keep_last=2).load()
    assert loaded is not None
    assert loaded.snapshot.step < 12
    assert str(victim) in loaded.notes[0]
    assert loaded.notes[0].code == "checkpoint_damaged"
    children = start_ranks(fork_server, 2, "unused", run, tmp_path / "log")
    assert_exit_codes(children, 0)
    assert str(victim) in (run / "report.html").read_text()


def test_commands_read_the_model_of_an_unfinished_run(stopped_run: Path, tmp_path: Path) -> None:
    """From the run or from its checkpoint, also if the last one is damaged."""
    last = stopped_run / "checkpoints/step-00000012"
    _, expected = read_training_checkpoint(last)
    for reference in (stopped_run, last):
        checkpoint = read_checkpoint(reference)
        assert checkpoint.tensors.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in checkpoint.tensors.items())
        assert checkpoint.labels == tuple("0123456789")
    run = tmp_path / "run"
    shutil.copytree(stopped_run, run)
    sorted((run / "checkpoints/step-00000012").glob(SHARD_PATTERN))[0].write_bytes(b"")
    (note,) = [note for note in read_checkpoint(run).notes if note.code == "run_unfinished"]
    assert "step-00000012" not in note
    with pytest.raises(CheckpointError, match="shard-00001"):
        read_checkpoint(run / "checkpoints/step-00000012")


def test_kill_between_shards_and_manifest_leaves_earlier_checkpoint(stopped_run: Path, tmp_path: Path) -> None:
    """What a killed process leaves has a temporary name; it is not loaded, and the next save removes it."""
    run = tmp_path / "run"
    shutil.copytree(stopped_run, run)
    (run / "checkpoints/step-00000012" / MANIFEST_FILE).unlink()
    (run / "checkpoints/step-00000012").rename(run / "checkpoints/.making-step-00000012")
    loaded = CheckpointStore(run, keep_last=2).load()
    assert loaded is not None
    assert loaded.snapshot.step < 12
    assert loaded.notes == ()


@pytest.mark.slow
def test_full_disk_in_one_process_keeps_earlier_checkpoint(
    fork_server: ForkServer, stopped_run: Path, tmp_path: Path
) -> None:
    """The second of two processes cannot write its fraction: all end with the same error, and nothing is lost."""
    run = tmp_path / "run"
    shutil.copytree(stopped_run, run)
    children = start_ranks(fork_server, 2, "full-disk", run, script=SHARDED_MODEL)
    assert_exit_codes(children, 0)
    outputs = [child.output() for child in children]
    for output in outputs:
        assert "checkpoint_not_saved" in output
        assert "No space left on device" in output
        assert f"patchword resume {run}" in output
    assert leftovers(run) == []
    loaded = CheckpointStore(run, keep_last=2).load()
    assert loaded is not None
    assert loaded.snapshot.step == 12


@pytest.mark.slow
def test_every_family_gives_the_same_outputs_when_sharded(fork_server: ForkServer) -> None:
    """Also models with computed buffers, whose values only the main process has; sharded_model.py compares."""
    assert_exit_codes(start_ranks(fork_server, 2, "families", script=SHARDED_MODEL), 0)


def test_memory_of_weights_gradients_and_optimizer_is_shared(fork_server: ForkServer) -> None:
    """At most 1.05 / W of the whole in each process; sharded_model.py counts the bytes."""
    assert_exit_codes(start_ranks(fork_server, 4, "memory", script=SHARDED_MODEL), 0)


def test_nan_in_one_process_stops_all(fork_server: ForkServer, tmp_path: Path) -> None:
    config = make_config(parallel="fsdp", grad_accum_steps=1)
    recipe, run = write_recipe(tmp_path / "recipe.py", config), tmp_path / "run"
    children = start_ranks(fork_server, 2, recipe, run, tmp_path / "log", "-1", str(5 * 100 + 50))
    assert_exit_codes(children, 2)
    for child in children:
        assert "not_finite" in child.output()
        assert "(input, images)" in child.output()
    assert [path.name for path in (run / "faults").iterdir()] == ["step-00000005"]
    assert read_training_checkpoint(run / "checkpoints/step-00000005")[0].step == 5


def test_single_process_trains_unsharded(stopped_run: Path, tmp_path: Path) -> None:
    """One process has nothing to share: it resumes the run of two, and writes checkpoints of format 1."""
    run = tmp_path / "run"
    shutil.copytree(stopped_run, run)
    result = resume(run)
    assert result is not None
    assert (run / f"checkpoints/step-{STEPS:08d}/state.safetensors").is_file()


@pytest.mark.parametrize(
    "changes",
    [{"optim": OptimConfig(name="muon")}, {"init": "patchword:cifar10", "head_init": "probe"}],
    ids=["muon", "probe"],
)
def test_unsupported_options_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--parallel ddp"):
        make_config(parallel="fsdp", **changes)


def test_batch_norm_is_refused(fork_server: ForkServer, tmp_path: Path) -> None:
    model = make_config().model.replace(stem="conv", stem_layers=(8,), patch_size=(2, 2))
    recipe = write_recipe(tmp_path / "recipe.py", make_config(model=model, parallel="fsdp"))
    children = [
        fork_server.start("train", recipe, "--out", tmp_path / "run", RANK=str(rank), WORLD_SIZE="2", **address)
        for address in [{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}]
        for rank in range(2)
    ]
    assert_exit_codes(children, 2)
    assert {child.error_code() for child in children} == {"unsupported_by_fsdp"}
    assert not (tmp_path / "run").exists()


def test_whole_read_of_a_missing_shard_is_an_error(stopped_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step"
    shutil.copytree(stopped_run / "checkpoints/step-00000012", folder)
    sorted(folder.glob(SHARD_PATTERN))[0].unlink()
    with pytest.raises(CheckpointError, match="shard-00001"):
        read_training_checkpoint(folder)
