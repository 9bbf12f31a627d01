"""Several "hosts" on one machine: Linux network namespaces, joined by a bridge, for tests of jobs on several hosts.

    pytestmark = pytest.mark.skipif(bool(missing_network()), reason=missing_network())

    with network(3) as hosts:
        hosts.run(0, ["python", "-c", "..."])  # as subprocess.run, in host 0
        hosts.start(1, hosts.torchrun(1, "--nnodes", 3, "train.py"))  # as subprocess.Popen
        hosts.limit("1gbit")                   # each direction of every host's cable
        hosts.cut(2)                           # pull the cable of host 2; hosts.restore(2) plugs it in

Host i has the address `hosts.address(i)` on its interface eth0, a loopback of its own, and no route to anywhere else.
This process is outside of the network. Files, processes, users and the host name are shared. Therefore

- torchrun cannot find out which host it is on, because the host name has no address here; `hosts.torchrun(i)` says it:
  `--local-addr` (else the processes look for the host name and fail) and `is_host` (else all wait for each other).
- gloo needs GLOO_SOCKET_IFNAME=eth0 for the same reason; `hosts.start` and `hosts.run` set it.
- the pids of all hosts are visible everywhere, so that a test can kill a process of any host.

Facts (Debian 12, Linux 6.18, root in a virtual machine): namespaces, veth, bridge and tbf work; netem is not in the
kernel, so there is no artificial delay or loss. Two torchrun agents in two hosts run gloo's all-reduce.

Everything is removed at the end, whatever happened; processes that are left in a host are killed. What a killed test
left behind is removed by the next `network()`. The bridge has a namespace of its own: the machine's own network is not
touched.
"""

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PREFIX = "patchword"
NAMESPACES = Path("/run/netns")
BURST = "256kb"  # what the limit lets through at once; it must hold a few of the kernel's 64 KiB segments
TIMEOUT = 60  # seconds; only a guard against hanging


class NetworkError(RuntimeError):
    """`ip` or `tc` failed."""


def configure(*command: object) -> str:
    """Run `ip` or `tc`; return what it prints."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode:
        raise NetworkError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


class Hosts:
    """A network of namespaces; `network` makes and removes it.

    Args:
        count: Number of hosts.
    """

    def __init__(self, count: int) -> None:
        assert 1 <= count <= 200
        self.count = count
        self.name = f"{PREFIX}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.switch = f"{self.name}-switch"
        self.processes: list[subprocess.Popen[Any]] = []

    def create(self) -> None:
        """Make the bridge, then one namespace and one cable per host."""
        configure("ip", "netns", "add", self.switch)
        configure("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        configure("ip", "-n", self.switch, "link", "set", "bridge", "up")
        for host in range(self.count):
            name = self.host(host)
            configure("ip", "netns", "add", name)
            peer = ("peer", "name", "eth0", "address", self.mac(host), "netns", name)
            cable = ("name", f"port{host}", "type", "veth", *peer)
            configure("ip", "-n", self.switch, "link", "add", *cable)
            configure("ip", "-n", self.switch, "link", "set", f"port{host}", "master", "bridge", "up")
            configure("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            configure("ip", "-n", name, "link", "set", "eth0", "up")
            configure("ip", "-n", name, "link", "set", "lo", "up")
            for other in set(range(self.count)) - {host}:  # without ARP, whose failures outlast a cut
                at = (self.address(other), "lladdr", self.mac(other), "dev", "eth0", "nud", "permanent")
                configure("ip", "-n", name, "neigh", "add", *at)

    def host(self, host: int) -> str:
        """Name of the namespace of a host."""
        assert 0 <= host < self.count
        return f"{self.name}-{host}"

    def address(self, host: int) -> str:
        """IP address of a host."""
        assert 0 <= host < self.count
        return f"10.0.0.{host + 1}"

    def mac(self, host: int) -> str:
        """Ethernet address of a host."""
        return f"02:00:00:00:00:{host + 1:02x}"

    def torchrun(self, host: int, *options: object) -> list[str]:
        """Beginning of a torchrun command in a host; host 0 has the rendezvous. Add options, then the program."""
        meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.address(0)}:29400", "--rdzv-id", self.name)
        here = ("--local-addr", self.address(host), "--rdzv-conf", f"is_host={int(host == 0)}")
        return [sys.executable, "-m", "torch.distributed.run", *meeting, *here, *map(str, options)]

    def start(self, host: int, command: Sequence[object], **options: Any) -> subprocess.Popen[Any]:
        """`subprocess.Popen` in a host; the process has the pid of the command itself."""
        environment = {**(options.pop("env", None) or os.environ), "GLOO_SOCKET_IFNAME": "eth0"}
        words = ["ip", "netns", "exec", self.host(host), *map(str, command)]
        process = subprocess.Popen(words, env=environment, **options)
        self.processes.append(process)
        return process

    def run(self, host: int, command: Sequence[object], **options: Any) -> subprocess.CompletedProcess[str]:
        """`subprocess.run` in a host, with captured text; killed after `timeout`."""
        timeout = options.pop("timeout", TIMEOUT)
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with self.start(host, command, **pipes, **options) as process:
            try:
                out, error = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, error)

    def cut(self, host: int) -> None:
        """Pull the cable of a host: it and the others hear nothing from each other, and get no error either."""
        configure("ip", "-n", self.switch, "link", "set", f"port{host}", "down")

    def restore(self, host: int) -> None:
        """Plug the cable in."""
        configure("ip", "-n", self.switch, "link", "set", f"port{host}", "up")

    def limit(self, rate: str) -> None:
        """Limit what each host sends and what it receives, for example to "1gbit"."""
        for host in range(self.count):
            for where, device in ((self.host(host), "eth0"), (self.switch, f"port{host}")):
                bucket = ("tbf", "rate", rate, "burst", BURST, "latency", "200ms")
                configure("tc", "-n", where, "qdisc", "replace", "dev", device, "root", *bucket)

    def bytes_sent(self, host: int) -> int:
        """How many bytes a host has sent to the others."""
        text = configure("ip", "-n", self.host(host), "-s", "link", "show", "dev", "eth0")
        return int(re.search(r"TX:.*\n\s*(\d+)", text)[1])  # type: ignore[index]

    def remove(self) -> None:
        """Kill what still runs in the hosts and remove everything."""
        remove_namespaces(self.name)
        for process in self.processes:
            process.wait(TIMEOUT)


def remove_namespaces(prefix: str) -> None:
    """Remove all namespaces whose names begin so, with their processes; interfaces and bridges go with them."""
    for path in sorted(NAMESPACES.glob(f"{prefix}-*")):
        with suppress(NetworkError):
            for pid in configure("ip", "netns", "pids", path.name).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        with suppress(NetworkError):  # another test may have removed it
            configure("ip", "netns", "delete", path.name)


def remove_leftovers() -> None:
    """Remove the networks of processes that no longer exist."""
    owners = {match[1] for path in NAMESPACES.glob("*") if (match := re.match(rf"{PREFIX}-(\d+)-", path.name))}
    for pid in owners:
        if not Path(f"/proc/{pid}").exists():
            remove_namespaces(f"{PREFIX}-{pid}")


@contextmanager
def network(count: int, rate: str = "") -> Iterator[Hosts]:
    """Make `count` hosts, optionally with a limit on their bandwidth, and remove them at the end."""
    remove_leftovers()
    hosts = Hosts(count)
    try:
        hosts.create()
        if rate:
            hosts.limit(rate)
        yield hosts
    finally:
        hosts.remove()


@functools.cache
def missing_network(rate: str = "") -> str:
    """Why this machine cannot make such a network, in one line; an empty string if it can.

    Args:
        rate: A limit of the bandwidth that is needed, too.
    """
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"{program} (iproute2) is not installed"
    try:
        with network(1, rate):
            return ""
    except NetworkError as error:
        return "network namespaces are not permitted here: " + str(error).splitlines()[0]
