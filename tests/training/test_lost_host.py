"""A job on two hosts continues on one when the other is lost: the network between them is cut in the middle of a step.

The hosts are network namespaces of this machine (helpers/namespaces.py).
"""

import json
import os
from pathlib import Path

import pytest

from helpers.namespaces import missing_network, network
from helpers.runs import SINGLE_THREAD_ENV, rows, tiny_config, wait_until, write_recipe
from patchword.training import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_network()), reason=missing_network() or "there is a network"),
]

STEPS, PAUSED_STEP = 16, 9
# The main process of two waits at a step until the test has cut the network. Recipes may be read more than once.
PAUSE = f"""
import os, pathlib, time
from patchword.training.trainer import Trainer

marker = pathlib.Path(__file__).with_name("paused")
if os.environ.get("RANK") == "0" and os.environ.get("WORLD_SIZE") == "2" and not hasattr(Trainer, "is_patched"):
    train_step, Trainer.is_patched = Trainer.train_step, True

    def patched(self, progress):
        if self.step == {PAUSED_STEP}:
            marker.touch()
            while marker.exists():
                time.sleep(0.01)
        return train_step(self, progress)

    Trainer.train_step = patched
"""


@pytest.mark.parametrize("parallel", ["fsdp"])  # "ddp": benchmarks/scale_training.py
def test_survivor_resumes_without_lost_host(tmp_path: Path, parallel: str) -> None:
    """The survivor's process gives up after `dist_timeout`; torchrun starts it again, alone, and it resumes."""
    model = tiny_config().model.replace(dropout=0.0, attention_dropout=0.0, drop_path=0.0)
    config = tiny_config(
        model=model, steps=STEPS, eval_every=0.1, save_every=3600.0, num_threads=1, parallel=parallel, dist_timeout=20.0
    )
    recipe, run = write_recipe(tmp_path / "recipe.py", config), tmp_path / "run"
    with Path(recipe).open("a") as file:
        file.write(PAUSE)
    environment = {**SINGLE_THREAD_ENV, "PYTHONFAULTHANDLER": "1"}
    with network(2) as hosts:
        jobs = []
        for host in range(2):
            # A host that is alone is waited for so long, and one that is silent counts as lost after three intervals.
            patience = f"is_host={int(host == 0)},last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3"
            torchrun = hosts.torchrun(host, "--nnodes", "1:2", "--nproc-per-node", 1, "--max-restarts", 3)
            torchrun[torchrun.index("--rdzv-conf") + 1] = patience
            command = [*torchrun, "-m", "patchword", "train", recipe, "--out", run]
            with (tmp_path / f"log-{host}").open("w") as log:
                jobs.append(hosts.start(host, command, env=environment, stdout=log, stderr=log))
        paused = tmp_path / "paused"
        assert wait_until(lambda: paused.exists() or jobs[0].poll() is not None)
        assert paused.exists(), (tmp_path / "log-0").read_text()
        assert json.loads((run / "config.json").read_text())["config"]["parallel"] == parallel
        hosts.cut(1)
        paused.unlink()
        code = jobs[0].wait(600)  # only a guard against hanging
        log_text = (tmp_path / "log-0").read_text()
    assert code == 0, log_text
    assert "resumed" in log_text
    assert (run / "report.html").is_file()
    train(config, tmp_path / "single")
    pairs = list(zip(rows(run), rows(tmp_path / "single"), strict=True))
    assert len(pairs) > STEPS // 2
    for actual, expected in pairs:
        name = "loss" if actual["kind"] == "train" else "nll"
        assert actual["step"] == expected["step"]
        assert actual[name] == pytest.approx(expected[name], abs=1e-5)
    assert os.listdir(run / "checkpoints")
