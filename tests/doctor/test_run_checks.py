"""The doctor on runs: finished, killed, stopped by NaN, with damaged checkpoints."""

import math
from pathlib import Path

import pytest

from helpers.tiny_trainer import config, make_splits
from patchword.data.loader import Batch, Loader
from patchword.doctor import Finding, examine_run
from patchword.errors import TrainingError
from patchword.training import train
from patchword.training.callbacks import Callback, LogRow


class KillAt(Callback):
    """Ends a run at a step without saving, as a kill does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, row: LogRow, progress: float, seconds_left: float) -> None:
        if row["step"] == self.step:
            raise KeyboardInterrupt


def killed_run(run: Path, step: int) -> Path:
    """Kill a run of six steps that is evaluated and saved after every third one."""
    with pytest.raises(KeyboardInterrupt):
        train(config(steps=6), run, splits=make_splits(), callbacks=(KillAt(step),))
    return run


def only_finding(run: Path) -> Finding:
    codes = ("unfinished_run", "damaged_checkpoints", "no_intact_checkpoint")
    (finding,) = [finding for finding in examine_run(run) if finding.code in codes]
    return finding


def test_finished_run_has_no_problems(tmp_path: Path) -> None:
    train(config(steps=2), tmp_path / "run", splits=make_splits())
    assert all(finding.severity == "note" for finding in examine_run(tmp_path / "run"))
    assert not any("patchword resume" in finding.advice for finding in examine_run(tmp_path / "run"))


@pytest.mark.parametrize(("killed_at", "checkpoint"), [(5, "step 3"), (2, "step 0")])
def test_killed_run_can_be_resumed(tmp_path: Path, killed_at: int, checkpoint: str) -> None:
    run = killed_run(tmp_path / "run", killed_at)
    finding = only_finding(run)
    assert (finding.severity, finding.code) == ("note", "unfinished_run")
    assert checkpoint in finding.message
    assert finding.advice.endswith(f"patchword resume {run}")


def test_damaged_checkpoint_is_reported(tmp_path: Path) -> None:
    run = killed_run(tmp_path / "run", 5)
    (run / "checkpoints/step-00000003/state.json").write_bytes(b"{}")
    finding = only_finding(run)
    assert (finding.severity, finding.code) == ("error", "no_intact_checkpoint")
    assert "step-00000003/state.json" in finding.message


def test_run_stopped_by_nan_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_batch = Loader.make_train_batch

    def batch_with_nan(self: Loader, batch_range: tuple[int, int]) -> Batch:
        batch = make_batch(self, batch_range)
        if batch_range[0] == 16:  # the second step
            batch.images[0, 0, 0, 0] = math.nan
        return batch

    monkeypatch.setattr(Loader, "make_train_batch", batch_with_nan)
    with pytest.raises(TrainingError) as error:
        train(config(steps=6), tmp_path / "run", splits=make_splits())
    assert error.value.code == "not_finite"
    (fault,) = [finding for finding in examine_run(tmp_path / "run") if finding.severity == "error"]
    assert "Step 2 " in fault.message
    assert "(input, images)" in fault.message
    assert fault.code == "fault_reproduced"
    assert len(fault.details) == 10
