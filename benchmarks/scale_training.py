"""Training in several processes: equality, kills, memory, and the cost of a network. `scale.py` runs it.

- equality: samples and losses of 1 to 4 processes, "ddp" and "fsdp", against one process
- kills: a random process gets SIGKILL at a random step; the resumed run must end bit-identical
- memory: growth of the peak memory of ViT-L/16 by training steps, in each of 1, 2 and 4 processes
- network: seconds per step of Ti/16 on 2 and 4 "hosts" (network namespaces), without a limit and at 1 Gbit/s
"""

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.namespaces import missing_network, network
from helpers.runs import (
    ForkServer,
    assert_exit_codes,
    final_state,
    free_port,
    rows,
    start_ranks,
    tiny_config,
    wait_until,
    write_recipe,
)

STEPS = 30
GIGABIT = 125_000_000  # bytes per second
STEP_PROBE = Path(__file__).with_name("sharded_step.py")


def tiny_run(server: ForkServer, folder: Path, world_size: int, parallel: str, *options: str) -> Path:
    """Train a tiny ViT on digits without dropout, whose random numbers differ between processes."""
    model = tiny_config().model.replace(dropout=0.0, attention_dropout=0.0, drop_path=0.0)
    config = tiny_config(model=model, steps=STEPS, batch_size=48, save_every=0.2, num_threads=1, parallel=parallel)
    folder.mkdir(exist_ok=True)
    recipe = write_recipe(folder / "recipe.py", config)
    assert_exit_codes(start_ranks(server, world_size, recipe, folder / "run", folder / "log", *options), 0)
    return folder / "run"


def read_samples(folder: Path) -> list[str]:
    lines = [line for path in folder.glob("log.*") for line in path.read_text().splitlines()]
    return sorted(lines, key=lambda line: int(line.split()[0]))


def measure_equality(server: ForkServer, folder: Path) -> list[dict[str, Any]]:
    """Compare runs of several processes with one process."""
    single, table = tiny_run(server, folder / "one", 1, "ddp"), []
    for parallel in ("ddp", "fsdp"):
        for world_size in (2, 3, 4):
            run = tiny_run(server, folder / f"{parallel}{world_size}", world_size, parallel)
            pairs = list(zip(rows(run), rows(single), strict=True))
            losses = [(a.get("loss", a.get("nll")), b.get("loss", b.get("nll"))) for a, b in pairs]
            row = {
                "parallel": parallel,
                "processes": world_size,
                "same_samples": read_samples(run.parent) == read_samples(single.parent),
                "max_loss_difference": max(abs(a - b) for a, b in losses),
            }
            print(f"{parallel:5} {world_size} processes: same samples {row['same_samples']}, "
                  f"losses within {row['max_loss_difference']:.1e}")  # fmt: skip
            table.append(row)
    return table


def measure_kills(server: ForkServer, folder: Path, kills: int) -> dict[str, Any]:
    """Kill a random process at a random step, then what torchrun would kill, and resume; repeat."""
    rng, table = random.Random(0), []
    cases = [(parallel, world_size) for parallel in ("ddp", "fsdp") for world_size in (2, 3, 4)]
    for number, (parallel, world_size) in enumerate(cases):
        count = kills // len(cases) + (number < kills % len(cases))
        name = f"killed-{parallel}{world_size}"
        whole = tiny_run(server, folder / f"{name}-whole", world_size, parallel)
        work, run = folder / name, folder / name / "run"
        work.mkdir()
        recipe = shutil.copy(whole.parent / "recipe.py", work)
        for step in sorted(rng.sample(range(1, STEPS), count)):
            log = work / f"log-{step}"
            children = start_ranks(server, world_size, recipe, run, log, "-1", "-1", str(step))
            marker = Path(f"{log}.0.paused")
            wait_until(lambda marker=marker, children=children: marker.exists() or children[0].has_exited())
            victim = rng.randrange(world_size)
            children[victim].kill()
            for rank, child in enumerate(children):
                if rank != victim:
                    child.send_signal(signal.SIGKILL)
                    child.wait()
        assert_exit_codes(start_ranks(server, world_size, recipe, run, work / "log"), 0)
        identical = final_state(run, STEPS) == final_state(whole, STEPS)
        print(f"{parallel:5} {world_size} processes, {count} kills: bit-identical {identical}")
        table.append({"parallel": parallel, "processes": world_size, "kills": count, "identical": identical})
    return {"kills": sum(row["kills"] for row in table), "runs": table}


def run_steps(world_size: int, *arguments: object, hosts: Any = None) -> list[dict[str, Any]]:
    """Run sharded_step.py in several processes or hosts; return what each prints."""
    environment = {**os.environ, "WORLD_SIZE": str(world_size), "MASTER_PORT": free_port()}
    environment |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": hosts.address(0) if hosts else "127.0.0.1"}
    command = [sys.executable, str(STEP_PROBE), *map(str, arguments)]
    processes = []
    for rank in range(world_size):
        options: dict[str, Any] = {"env": {**environment, "RANK": str(rank)}, "stdout": subprocess.PIPE, "text": True}
        processes.append(hosts.start(rank, command, **options) if hosts else subprocess.Popen(command, **options))
    outputs = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), outputs
    return [json.loads(text.splitlines()[-1]) for text in outputs]


def measure_memory() -> list[dict[str, Any]]:
    """Return the peak memory growth of L/16 at batch size 4; the ratio is that of the largest process to one alone."""
    table: list[dict[str, Any]] = []
    for world_size, parallel in ((1, "ddp"), (2, "fsdp"), (4, "fsdp")):
        results = run_steps(world_size, "L/16", parallel, 224, 4, 2)
        growth = max(result["peak_growth_mib"] for result in results)
        held = max(result["held_mib"] for result in results)
        row = {"processes": world_size, "parallel": parallel, "peak_growth_mib": growth, "held_mib": held}
        first = table[0] if table else row
        row["ratio"] = round(growth / first["peak_growth_mib"], 3)
        row["held_ratio_times_processes"] = round(held / first["held_mib"] * world_size, 3)
        print(
            f"L/16, {world_size} processes ({parallel}): +{growth:.0f} MiB, {row['ratio']:.2f} of one process; "
            f"weights, gradients and optimizer {held:.0f} MiB, {row['held_ratio_times_processes']:.3f} / W"
        )
        table.append(row)
    return table


def measure_network(rounds: int) -> list[dict[str, Any]]:
    """Return seconds per step with and without a limit, interleaved, and what computing plus sending would take."""
    if reason := missing_network("1gbit"):
        print(f"network: skipped, {reason}")
        return []
    table = []
    for world_size in (2, 4):
        for parallel in ("ddp", "fsdp"):
            seconds: dict[str, list[float]] = {"free": [], "1gbit": []}
            sent: list[float] = []
            for _ in range(rounds):
                for rate in seconds:
                    with network(world_size, "" if rate == "free" else rate) as hosts:
                        results = run_steps(world_size, "Ti/16", parallel, 224, 4 * world_size, 6, hosts=hosts)
                        seconds[rate].append(max(result["step_seconds"] for result in results))
                        sent.append(max(result["bytes_per_step"] for result in results))
            free, limited, size = (statistics.median(v) for v in (seconds["free"], seconds["1gbit"], sent))
            predicted = free + size / GIGABIT
            row = {"processes": world_size, "parallel": parallel, "free_seconds": free, "limited_seconds": limited}
            row |= {"megabytes_per_step": round(size / 1e6, 1), "predicted_seconds": predicted}
            row["ratio_to_predicted"] = round(limited / predicted, 3)
            print(f"Ti/16, {world_size} hosts, {parallel:4}: {free:.2f} s free, {limited:.2f} s at 1 Gbit/s "
                  f"({size / 1e6:.0f} MB per step), {row['ratio_to_predicted']:.2f} of the prediction")  # fmt: skip
            table.append(row)
    return table


def measure_processes(kills: int) -> dict[str, Any]:
    """Compare runs of several processes with one, and kill some."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ForkServer(folder) as server:
            return {"equality": measure_equality(server, folder), "kills": measure_kills(server, folder, kills)}
