"""The examples for clusters: Ray Train with two workers of a local Ray, and the syntax of the Slurm script."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import patchword as pw

ROOT = Path(__file__).parents[2]
TIMEOUT = 600  # seconds


def train_losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "train"]


@pytest.mark.slow
def test_ray_train(tmp_path: Path) -> None:
    """Two workers train one model: their first loss is that of one process, so they share its batch."""
    pytest.importorskip("ray.train", reason="ray[train] is not installed")
    out = tmp_path / "run"
    local = {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    command = [sys.executable, ROOT / "examples/ray_train.py", "--workers", "2", "--epochs", "1", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env={**os.environ, **local})
    assert done.returncode == 0, done.stderr[-4000:]
    printed = done.stdout + done.stderr
    assert set(re.findall(r"worker \d of \d", printed)) == {"worker 0 of 2", "worker 1 of 2"}
    assert pw.Classifier.load(out).labels
    single = pw.train(pw.load_recipe("quickstart").replace(epochs=1), tmp_path / "single")
    assert single
    losses = [train_losses(run) for run in (out, single.run_dir)]
    assert len(losses[0]) == len(losses[1]) > 10
    assert losses[0][0] == pytest.approx(losses[1][0], abs=1e-5)


def test_slurm_script() -> None:
    script = ROOT / "examples/slurm_train.sh"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    assert "# Not run: under Slurm" in script.read_text()
