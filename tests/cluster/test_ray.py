"""Large jobs on a real Ray cluster of four raylets: whatever dies, the parts are those of a local run."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.command import run_in_process
from helpers.prediction_jobs import (
    MODEL,
    POISON,
    SITE_CUSTOMIZE,
    load_model,
    make_photos,
    make_request,
    read_parts,
    read_rows,
    run_here,
)
from helpers.ray_cluster import busy_node, kill_actor, ray_cluster, signal_node, start_driver, wait_until
from patchword.cluster import ray as ray_runner
from patchword.inference.prediction_job import finish_job, open_job
from patchword.inference.prediction_parts import ChunkModel, ChunkResult, predict_chunk

pytestmark = pytest.mark.slow
CHUNK_SIZE = 4
NUM_PHOTOS = 160
POISONOUS = "2/0101.png"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Its workers decode slowly, so that there is time to kill them."""
    folder = tmp_path_factory.mktemp("site")
    slow = "\nimport time\nfast = load_image\n"
    slow += "def load_image(source, **options):\n    time.sleep(0.02)\n    return fast(source, **options)\n"
    (folder / "sitecustomize.py").write_text(SITE_CUSTOMIZE + slow + "decoder.load_image = load_image\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("OMP_NUM_THREADS", "1")
        with ray_cluster(3) as cluster:
            yield cluster


def count_parts(out: Path) -> int:
    return len(list(out.glob("part-*.parquet")))


def compute_reference(photos: Path, out: Path) -> dict[str, bytes]:
    """The parts of an undisturbed run on this machine."""
    job = open_job(make_request(photos, out, chunk_size=CHUNK_SIZE))
    model = ChunkModel.open(load_model(), job.manifest.settings)
    for number in job.pending():
        keys = [entry.key for entry in job.manifest.entries(number)]
        predict_chunk(model, job.manifest, number, poisonous={i for i, key in enumerate(keys) if key == POISONOUS})
    finish_job(job)
    return read_parts(out)


def test_nothing_is_lost_or_doubled(cluster: Any, tmp_path: Path) -> None:
    """One job: SIGKILL of an actor, of a raylet and of the driver; a paused node; an image that kills its actor."""
    photos, out = tmp_path / "photos", tmp_path / "out"
    make_photos(photos, NUM_PHOTOS)
    (photos / POISONOUS).write_bytes(POISON)
    words = ("predict", MODEL, photos, "--out", out, "--top", 2, "--chunk-size", CHUNK_SIZE, "--json")

    with start_driver(cluster.address, *words) as driver:
        wait_until(lambda: count_parts(out) > 0 and kill_actor(cluster), driver)
        wait_until(lambda: count_parts(out) > 3 and busy_node(cluster), driver)
        cluster.remove_node(busy_node(cluster), allow_graceful=False)
        cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20, include_dashboard=False)
        before = count_parts(out)
        wait_until(lambda: count_parts(out) > before + 2, driver)
        driver.kill()
        driver.communicate(timeout=60)

    with start_driver(cluster.address, *words) as driver:
        wait_until(lambda: busy_node(cluster), driver)
        paused, before = busy_node(cluster), count_parts(out)
        signal_node(paused, signal.SIGSTOP)
        wait_until(lambda: count_parts(out) > before + 3, driver)  # another node has the work now
        signal_node(paused, signal.SIGCONT)
        stdout, stderr = driver.communicate(timeout=400)
    assert driver.returncode == 3, stderr
    assert "Traceback" not in stderr
    summary = json.loads(stdout)
    assert summary["images"] == NUM_PHOTOS + 1
    assert summary["error_codes"] == {"image_crashes": 1, "image_unsupported": 1}
    paths = [row["path"] for row in read_rows(out)]
    assert len(paths) == len(set(paths)) == NUM_PHOTOS + 1
    assert read_parts(out) == compute_reference(photos, tmp_path / "local")


def test_a_stopped_driver_says_how_to_continue(cluster: Any, tmp_path: Path) -> None:
    make_photos(tmp_path / "photos", NUM_PHOTOS)
    out = tmp_path / "out"
    words = ("embed", MODEL, tmp_path / "photos", "--out", f"{out}/", "--chunk-size", CHUNK_SIZE)
    with start_driver(cluster.address, *words) as driver:
        wait_until(lambda: count_parts(out) > 0, driver)
        time.sleep(0.5)
        driver.send_signal(signal.SIGTERM)
        stderr = driver.communicate(timeout=120)[1]
    assert driver.returncode == 128 + signal.SIGTERM, stderr
    assert "type the same command again" in stderr
    assert "Traceback" not in stderr
    left = open_job(make_request(tmp_path / "photos", out, task="embed", chunk_size=CHUNK_SIZE))
    assert 0 < len(left.pending()) < left.manifest.num_chunks
    run_here(left)  # on this machine, without Ray
    assert finish_job(left)["images"] == len(read_rows(out)) == NUM_PHOTOS + 1


def test_no_cluster_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_photos(tmp_path / "photos", 1)
    words = ("predict", MODEL, tmp_path / "photos", "--out", tmp_path / "out", "--ray")
    for address in ("127.0.0.1:1", "nonsense", "nowhere.invalid:6379"):
        refused = run_in_process(capsys, *words, address)
        assert refused.returncode == 2
        assert f"--ray {address}: there is no Ray cluster" in refused.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ray.data", None)
        refused = run_in_process(capsys, *words, "auto")
    assert refused.returncode == 2
    assert "--ray needs the package ray: " in refused.stderr
    assert not (tmp_path / "out").exists()


def test_late_responses_of_the_tracker_lose_nothing(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_photos(tmp_path / "photos", 3)
    job = open_job(make_request(tmp_path / "photos", tmp_path / "out", chunk_size=1))
    counts: list[int] = []
    with ray_runner._connect(cluster.address):
        import ray

        tracker = ray.remote(num_cpus=0)(ray_runner._Tracker).remote()
        collector = ray_runner._Collector(job, tracker, counts.append)
        for number in range(3):
            ray.get(tracker.add.remote(number, 1))
            ray.get(tracker.finish.remote(ChunkResult(number, 1)))
            monkeypatch.setattr(ray_runner, "COLLECT_TIMEOUT", 0)
            collector.collect()
        monkeypatch.setattr(ray_runner, "COLLECT_TIMEOUT", 60)
        collector.collect()
        collector.collect()
    assert sum(counts) == 3
    assert [result.number for result in job.results] == [0, 1, 2]
