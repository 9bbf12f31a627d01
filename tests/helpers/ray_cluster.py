"""A real Ray cluster of several raylets on this machine, and ways to hurt it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# A node is declared dead after about four seconds instead of half a minute.
SYSTEM_CONFIG = {
    "health_check_initial_delay_ms": 2000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
OBJECT_STORE_BYTES = 100 * 2**20
ACTOR = "ray::MapWorker"  # how Ray names the processes of the pool


@contextlib.contextmanager
def ray_cluster(num_nodes: int) -> Iterator[Any]:
    """A head without CPUs, and nodes with one CPU each; skips where Ray is not installed."""
    pytest.importorskip("ray", reason="a cluster needs the extra cluster")
    from ray.cluster_utils import Cluster

    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_memory_monitor_refresh_ms="0", RAY_DEDUP_LOGS="0")
    options = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    head = {"num_cpus": 0, "_system_config": SYSTEM_CONFIG, **options}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(num_nodes):
            cluster.add_node(num_cpus=1, **options)
        yield cluster
    finally:
        cluster.shutdown()


def start_driver(address: str, *words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "patchword", *map(str, words), "--ray", address]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str], seconds: float = 240) -> None:
    """Wait; fails if the driver ends before."""
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            pytest.fail(f"the driver ended with {process.returncode}: {process.communicate()[1]}")
        assert time.monotonic() < end, "nothing happens"
        time.sleep(0.02)


def processes_below(pid: int) -> list[int]:
    """The descendants of a process."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found, level = [], [pid]
    while level:
        level = [child for child, parent in parents.items() if parent in level]
        found += level
    return found


def actors_of(node: Any) -> list[int]:
    """The processes of the pool on a node."""
    return [pid for pid in processes_below(raylet_of(node)) if command_of(pid).startswith(ACTOR)]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def kill_actor(cluster: Any) -> bool:
    """SIGKILL one process of the pool; False if there is none at present."""
    for node in cluster.worker_nodes:
        for pid in actors_of(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return True
    return False


def busy_node(cluster: Any) -> Any:
    """A node with a process of the pool; None if there is none at present."""
    return next((node for node in cluster.worker_nodes if actors_of(node)), None)


def signal_node(node: Any, number: signal.Signals) -> None:
    """Send a signal to a raylet and all its workers."""
    raylet = raylet_of(node)
    for pid in [raylet, *processes_below(raylet)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
