"""Large jobs: the cost of Ray and of an object store, and rounds of faults.

    python benchmarks/scale_predict.py MODEL IMAGES [--rounds 5] [--images-per-round 1280] [--faults 20]

MODEL is a Ti/16, IMAGES a folder of photographs. Rates are those after start-up: from the first part to the last.
`measure` returns both comparisons as JSON, `rounds_of_faults` kills a Ray cluster again and again.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.object_server import BUCKET, ObjectServer, environment, faulty
from helpers.prediction_jobs import SITE_CUSTOMIZE, make_photos, make_request, photo, read_parts, read_rows, run_job
from helpers.ray_cluster import busy_node, kill_actor, ray_cluster, signal_node, start_driver, wait_until

FAULT_RATES = {name: 0.05 for name in ("500", "503", "reset", "lost", "truncate", "conflict")} | {"stall": 0.005}
CHUNK_SIZE = 256  # the start of a chunk, when nothing is read ahead yet, must not weigh more than in a real job


def copy_images(source: Path, target: Path, count: int) -> list[Path]:
    """Copy `count` images, again and again if there are fewer."""
    files = sorted(path for path in source.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    target.mkdir(parents=True)
    return [
        Path(shutil.copy(files[i % len(files)], target / f"{i:06}{files[i % len(files)].suffix}")) for i in range(count)
    ]


def rate_of_parts(out: Path, count: int) -> float:
    """Images per second between the first part and the last."""
    times = sorted(path.stat().st_mtime_ns / 1e9 for path in out.glob("part-*.parquet"))
    return (count - CHUNK_SIZE) / (times[-1] - times[0])


def rate_of_command(model: str, photos: Path, count: int, *flags: str) -> float:
    """Run `patchword predict` and return its rate after start-up."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        words = ["predict", model, str(photos), "--out", str(out), "--chunk-size", str(CHUNK_SIZE), *flags]
        subprocess.run([sys.executable, "-m", "patchword", *words], check=True, capture_output=True)
        return rate_of_parts(out, count)


def rate_of_storage(model: Any, checkpoint: Any, inputs: str, out: str, count: int) -> float:
    """Compute a job in this process and return its rate after the first chunk."""
    from patchword.inference.prediction_job import open_job
    from patchword.inference.prediction_parts import predict_chunk

    job = open_job(make_request(inputs, out, chunk_size=CHUNK_SIZE, checkpoint=checkpoint, top=5))
    first, *rest = job.pending()
    predict_chunk(model, job.manifest, first)
    start = time.perf_counter()
    for number in rest:
        predict_chunk(model, job.manifest, number)
    return (count - CHUNK_SIZE) / (time.perf_counter() - start)


def interleave(measures: dict[str, Callable[[], float]], rounds: int) -> dict[str, Any]:
    """Run all measures in each round, so that they see the same machine; return rates and medians."""
    rates: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(rounds):
        names = list(measures) if number % 2 == 0 else list(reversed(measures))
        for name in names:
            rates[name].append(round(measures[name](), 2))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    base, other = medians.values()
    return {"images_per_second": rates, "median": medians, "slower": round(1 - other / base, 4)}


def measure_ray(model: str, photos: Path, count: int, rounds: int) -> dict[str, Any]:
    """Ray on this machine against the local runner; the goal is at most 5 % slower."""
    measures: dict[str, Callable[[], float]] = {
        "local": lambda: rate_of_command(model, photos, count),
        "ray": lambda: rate_of_command(model, photos, count, "--ray", "local"),
    }
    return interleave(measures, rounds)


def measure_storage(model: str, photos: Path, count: int, rounds: int) -> dict[str, Any]:
    """Images and parts in moto on this machine against a local disk; the goal is at most 10 % slower."""
    from patchword.checkpoints import read_checkpoint
    from patchword.inference.prediction_parts import ChunkModel

    checkpoint = read_checkpoint(model)
    ready = ChunkModel.open(checkpoint, {"task": "predict", "engine": "torch", "top": 5})
    server = ObjectServer()
    os.environ.update(environment(server.endpoint))
    for path in sorted(photos.iterdir()):
        server.put(f"photos/{path.name}", path.read_bytes())
    numbers = iter(range(10**6))
    try:
        with tempfile.TemporaryDirectory() as folder:
            measures: dict[str, Callable[[], float]] = {
                "disk": lambda: rate_of_storage(ready, checkpoint, str(photos), f"{folder}/{next(numbers)}", count),
                "moto": lambda: rate_of_storage(
                    ready, checkpoint, f"s3://{BUCKET}/photos", f"s3://{BUCKET}/out/{next(numbers)}", count
                ),
            }
            return interleave(measures, rounds)
    finally:
        server.stop()


def measure(
    compare: Callable[[str, Path, int, int], dict[str, Any]],
    model: str,
    images: str | Path,
    rounds: int = 5,
    count: int = 1280,
) -> dict[str, Any]:
    """One of the comparisons, `measure_ray` or `measure_storage`, on `count` of the images, as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder, "photos")
        copy_images(Path(images), photos, count)
        return {"images": count, "chunk_size": CHUNK_SIZE, "rounds": rounds, **compare(model, photos, count, rounds)}


def rounds_of_storage_faults(rounds: int) -> dict[str, Any]:
    """Two commands at once on one output, in an object store behind a network that fails; counts wrong outputs."""
    counts: Counter[str] = Counter({"rounds": 0, "different_parts": 0, "wrong_exit_codes": 0})
    server = ObjectServer()
    for number in range(200):
        server.put(f"photos/{number:04}.png", photo(number))
    try:
        os.environ.update(environment(server.endpoint))
        quiet = f"s3://{BUCKET}/quiet"
        run_job(f"s3://{BUCKET}/photos", quiet, chunk_size=8, top=5)
        for number in range(rounds):
            out = f"s3://{BUCKET}/out{number}"
            words = ["predict", "patchword:cifar10", f"s3://{BUCKET}/photos", "--out", out, "--chunk-size", "8"]
            with faulty(server, FAULT_RATES, seed=number) as proxy:
                variables = {**os.environ, **environment(proxy.endpoint, timeout=60)}
                command = [sys.executable, "-m", "patchword", *words]
                drivers = [subprocess.Popen(command, env=variables, stderr=subprocess.DEVNULL) for _ in range(2)]
                counts["wrong_exit_codes"] += sum(driver.wait(600) != 0 for driver in drivers)
                counts.update(proxy.faults())
            counts["rounds"] += 1
            counts["different_parts"] += read_parts(out) != read_parts(quiet)
            print(f"round {number + 1}: {json.dumps(counts)}", flush=True)
    finally:
        server.stop()
    return dict(counts)


def rounds_of_faults(rounds: int, seed: int = 0) -> dict[str, Any]:
    """Jobs on a Ray cluster of four raylets, in each of which one thing is killed; counts lost and doubled rows."""
    random_source = random.Random(seed)
    faults = ["actor", "raylet", "driver", "pause", "all"]
    counts = {"rounds": 0, "missing": 0, "doubled": 0, "different_parts": 0, "restarts_of_driver": 0}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(SITE_CUSTOMIZE)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        photos = Path(folder, "photos")
        make_photos(photos, 400)
        run_job(photos, Path(folder, "local"), chunk_size=4, top=5)
        reference = read_parts(Path(folder, "local"))
        with ray_cluster(3) as cluster:
            for number in range(rounds):
                out = Path(folder, f"out{number}")
                fault = random_source.choice(faults)
                counts["restarts_of_driver"] += run_with_fault(cluster, photos, out, fault, random_source)
                paths = [row["path"] for row in read_rows(out)]
                counts["rounds"] += 1
                counts["missing"] += 401 - len(set(paths))
                counts["doubled"] += len(paths) - len(set(paths))
                counts["different_parts"] += read_parts(out) != reference
                print(f"round {number + 1}: {fault}: {json.dumps(counts)}", flush=True)
    return counts


def run_with_fault(cluster: Any, photos: Path, out: Path, fault: str, random_source: random.Random) -> int:
    """Run a job to its end while something is killed; return how often the driver was started again."""
    words = ("predict", "patchword:cifar10", photos, "--out", out, "--chunk-size", 4)
    restarts = 0
    with start_driver(cluster.address, *words) as driver:
        wanted = random_source.randrange(1, 30)
        wait_until(lambda: len(list(out.glob("part-*"))) >= wanted, driver)
        hurt(cluster, driver, fault)
        driver.communicate(timeout=600)
    while driver.returncode not in (0, 3):
        restarts += 1
        with start_driver(cluster.address, *words) as driver:
            driver.communicate(timeout=600)
        assert restarts < 5, "the job does not end"
    return restarts


def hurt(cluster: Any, driver: "subprocess.Popen[str]", fault: str) -> None:
    """Do the damage."""
    if fault in ("actor", "all"):
        kill_actor(cluster)
    if fault == "pause":
        node = busy_node(cluster)
        if node is not None:
            signal_node(node, signal.SIGSTOP)
            time.sleep(10)
            signal_node(node, signal.SIGCONT)
            with contextlib.suppress(Exception):  # Ray has declared it dead
                cluster.remove_node(node, allow_graceful=False)
            cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20, include_dashboard=False)
    if fault in ("raylet", "all"):
        cluster.remove_node(cluster.worker_nodes and next(iter(cluster.worker_nodes)), allow_graceful=False)
        cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20, include_dashboard=False)
    if fault in ("driver", "all"):
        driver.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("images")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images-per-round", type=int, default=1280)
    parser.add_argument("--faults", type=int, default=0, help="rounds of faults; none by default")
    args = parser.parse_args()
    content: dict[str, Any] = {}
    for name, compare in (("ray", measure_ray), ("storage", measure_storage)):
        content[name] = measure(compare, args.model, args.images, args.rounds, args.images_per_round)
    if args.faults:
        content["cluster_faults"] = rounds_of_faults(args.faults)
        content["storage_faults"] = rounds_of_storage_faults(args.faults)
    print(json.dumps(content, indent=2))


if __name__ == "__main__":
    main()
