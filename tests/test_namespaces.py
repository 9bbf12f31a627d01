"""The hosts that other tests run on reach each other, can be cut off and slowed down, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.namespaces import NAMESPACES, PREFIX, Hosts, missing_network, network

pytestmark = pytest.mark.skipif(bool(missing_network()), reason=missing_network())

SERVE = """
import socket, sys
listener = socket.create_server((sys.argv[1], 7000))
print("listening", flush=True)
while True:
    connection, _ = listener.accept()
    with connection:
        size = 0
        while data := connection.recv(65536):
            size += len(data)
        connection.sendall(str(size).encode())
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[3])) as connection:
    connection.sendall(b"x" * int(sys.argv[2]))
    connection.shutdown(socket.SHUT_WR)
    print(connection.recv(100).decode())
"""

ALL_REDUCE = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print(total.item(), flush=True)
dist.destroy_process_group()
"""


def serve(hosts: Hosts, host: int) -> "subprocess.Popen[str]":
    """Start a server in a host that counts bytes."""
    process = hosts.start(host, [sys.executable, "-c", SERVE, hosts.address(host)], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "listening\n"
    return process


def send(hosts: Hosts, source: int, target: int, size: int = 10, timeout: float = 60) -> str:
    """Send bytes between hosts; return what the server has counted, or what went wrong."""
    done = hosts.run(source, [sys.executable, "-c", SEND, hosts.address(target), size, timeout])
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def left_behind(name: str) -> list[str]:
    return [path.name for path in NAMESPACES.glob(f"{name}-*")]


@pytest.mark.slow
def test_hosts_are_cut_and_restored() -> None:
    with network(3) as hosts:
        server = serve(hosts, 0)
        assert [send(hosts, source, 0) for source in (0, 1, 2)] == ["10"] * 3
        hosts.cut(1)
        assert "timed out" in send(hosts, 1, 0, timeout=2), "silence, as with a cable that was pulled"
        assert send(hosts, 2, 0) == "10", "the others are not affected"
        hosts.restore(1)
        assert send(hosts, 1, 0) == "10"
        assert server.poll() is None
    assert server.returncode == -signal.SIGKILL
    assert server.stdout
    server.stdout.close()
    assert left_behind(hosts.name) == []


def test_hosts_have_nothing_but_their_network() -> None:
    with network(1) as hosts:
        interfaces = hosts.run(0, ["ip", "-brief", "link"]).stdout.splitlines()
        assert sorted(line.split()[0].split("@")[0] for line in interfaces) == ["eth0", "lo"]
        assert "default" not in hosts.run(0, ["ip", "route"]).stdout


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_network("1gbit")), reason="the kernel cannot limit bandwidth (tbf)")
def test_bandwidth_is_limited() -> None:
    """A lower bound of the time, which no slow machine can break: 8 MB at 4 MB/s, less what the bucket holds."""
    size = 8_000_000
    with network(2, "32mbit") as hosts, serve(hosts, 0) as server:
        start = time.monotonic()
        assert send(hosts, 1, 0, size) == str(size)
        assert time.monotonic() - start > 1.5
        assert hosts.bytes_sent(1) > size
        server.kill()


@pytest.mark.slow
def test_torchrun_across_hosts(tmp_path: Path) -> None:
    program = tmp_path / "all_reduce.py"
    program.write_text(ALL_REDUCE)
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with network(2) as hosts:
        commands = [hosts.torchrun(host, "--nnodes", 2, "--nproc-per-node", 1, program) for host in (0, 1)]
        agents = [hosts.start(host, command, **pipes) for host, command in enumerate(commands)]
        ends = [agent.communicate(timeout=300) for agent in agents]
        assert [out for out, _ in ends] == ["3.0\n"] * 2, ends
        assert hosts.bytes_sent(1) > 0


def test_nothing_is_left_after_a_failure() -> None:
    with pytest.raises(ZeroDivisionError), network(2) as hosts:
        sleeper = hosts.start(1, ["sleep", "1000"])
        raise ZeroDivisionError
    assert sleeper.returncode == -signal.SIGKILL
    assert left_behind(hosts.name) == []


def test_leftovers_of_a_killed_test_are_removed() -> None:
    """The process with the network kills itself; the next network removes what it left, and only that."""
    code = """
import os, signal
from helpers.namespaces import network
with network(2) as hosts:
    print(hosts.start(0, ["sleep", "1000"]).pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with network(1) as other:
        with subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
        ) as killed:
            assert killed.stdout
            sleeper = int(killed.stdout.readline())
        assert len(left_behind(f"{PREFIX}-{killed.pid}")) == 3
        with network(1):
            assert left_behind(f"{PREFIX}-{killed.pid}") == []
            assert len(left_behind(other.name)) == 2
    state = Path(f"/proc/{sleeper}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z", "its process was killed, too"
