"""The files of deploy/: they are valid, fit the server, the Dockerfile and each other, and start a server."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from helpers.command import run_in_process
from helpers.replicas import HAPROXY, NO_HAPROXY, png
from helpers.serving import TIMEOUT, http_post
from patchword.serve.limits import Limits
from patchword.serve.prometheus import Metrics
from patchword.serve.server import KEEP_ALIVE_TIMEOUT, SHUTDOWN_GRACE

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted(path.name for path in DEPLOY.iterdir())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
HAPROXY_CONFIG = (DEPLOY / "haproxy.cfg").read_text()
UNIT = (DEPLOY / "patchword.service").read_text()
OBJECTS: dict[str, Any] = {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}
KSERVE: Any = yaml.safe_load((DEPLOY / "kserve.yaml").read_text())
COMPOSE: Any = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
POD: Any = OBJECTS["Deployment"]["spec"]["template"]["spec"]
PREDICTOR: Any = KSERVE["spec"]["predictor"]
(CONTAINER,), (KSERVE_CONTAINER,) = POD["containers"], PREDICTOR["containers"]
REPLICA: Any = COMPOSE["services"]["replica1"]


def seconds(text: str) -> float:
    """A time of HAProxy: "500ms", "30s"."""
    return float(text[:-2]) / 1000 if text.endswith("ms") else float(text.removesuffix("s"))


def haproxy_value(name: str, pattern: str = r"(\S+)") -> str:
    """The value after a name in haproxy.cfg, without comments."""
    lines = "\n".join(line for line in HAPROXY_CONFIG.splitlines() if not line.strip().startswith("#"))
    found = re.search(rf"(?:^|\s){re.escape(name)} {pattern}", lines, re.M)
    assert found, name
    return found[1]


def options_of(words: list[str]) -> dict[str, str]:
    """Options of a `serve` command line: {"--port": "8000"}."""
    flat = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    return {word: flat[at + 1] for at, word in enumerate(flat) if word.startswith("--")}


COMMANDS: dict[str, list[str]] = {
    "kubernetes.yaml": CONTAINER["args"],
    "kserve.yaml": KSERVE_CONTAINER["args"],
    "compose.yaml": REPLICA["command"],
    "patchword.service": re.search(r"^ExecStart=\S+ serve (.*)$", UNIT, re.M)[1].split(),  # type: ignore[index]
}
GRACE: dict[str, float] = {
    "kubernetes.yaml": POD["terminationGracePeriodSeconds"],
    "kserve.yaml": PREDICTOR["terminationGracePeriodSeconds"],
    "compose.yaml": seconds(REPLICA["stop_grace_period"]),
    "patchword.service": float(re.search(r"^TimeoutStopSec=(\d+)$", UNIT, re.M)[1]),  # type: ignore[index]
}


@pytest.mark.parametrize("name", FILES)
def test_headers(name: str) -> None:
    """Every file says what it is, how to use it, and what was not run."""
    lines = (DEPLOY / name).read_text().splitlines()
    header = "\n".join(itertools.takewhile(lambda line: line.startswith("#"), lines))
    for part in ("# Use: ", "# Tested: ", "# Not run: "):
        assert part in header, part
    tests = re.findall(r"\b(?:tests|benchmarks)/\S+?\.py", header)
    assert tests
    assert all((ROOT / path).exists() for path in tests)


@pytest.mark.parametrize("name", COMMANDS)
def test_command_lines(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The parser accepts all options; the path of the model is what it complains about."""
    model, *options = COMMANDS[name]
    assert model in ("/model", "/srv/model")
    result = run_in_process(capsys, "serve", "does-not-exist", *options, "--port", 0)
    assert result.returncode == 2
    assert "does-not-exist" in result.stderr


@pytest.mark.parametrize("name", GRACE)
def test_grace_periods(name: str) -> None:
    """Nobody kills a server that drains and finishes its requests."""
    drain = float(options_of(COMMANDS[name])["--drain-seconds"])
    limits = Limits()
    assert GRACE[name] > drain + SHUTDOWN_GRACE + limits.receive_timeout + limits.response_timeout + 5
    assert drain >= KEEP_ALIVE_TIMEOUT, "idle connections end while it drains"


@pytest.mark.parametrize("kind", OBJECTS)
def test_kubernetes_schema(kind: str) -> None:
    for version in ("1.30", kubernetes_validate.latest_version()):
        kubernetes_validate.validate(OBJECTS[kind], version, strict=True)


def test_schema_errors_are_found() -> None:
    broken = json.loads(json.dumps(OBJECTS["HorizontalPodAutoscaler"]))
    broken["spec"]["metrics"][0]["pods"]["target"]["averageValu"] = 16
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, kubernetes_validate.latest_version(), strict=True)


def test_kubernetes_objects_fit_each_other() -> None:
    labels = OBJECTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [OBJECTS[kind]["spec"]["selector"]["matchLabels"] for kind in ("Deployment", "PodDisruptionBudget")]
    selectors += [
        OBJECTS["Service"]["spec"]["selector"],
        OBJECTS["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ]
    assert selectors == [labels] * 4
    scaler = OBJECTS["HorizontalPodAutoscaler"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == OBJECTS["Deployment"]["metadata"]["name"]
    assert "replicas" not in OBJECTS["Deployment"]["spec"]
    (port,) = CONTAINER["ports"]
    assert OBJECTS["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    assert [each["port"] for each in OBJECTS["NetworkPolicy"]["spec"]["ingress"][0]["ports"]] == [port["name"]]
    (metric,) = scaler["metrics"]
    name = metric["pods"]["metric"]["name"]
    assert f"\n{name} ".encode() in Metrics().text(), "the server has this metric"
    assert int(metric["pods"]["target"]["averageValue"]) < int(options_of(CONTAINER["args"])["--queue-size"])


@pytest.mark.parametrize(("pod", "container"), [(POD, CONTAINER), (PREDICTOR, KSERVE_CONTAINER)], ids=["pod", "KServe"])
def test_pods_fit_the_image(pod: Any, container: Any) -> None:
    user = re.search(r"^USER (\d+):(\d+)$", DOCKERFILE, re.M)
    assert user, "a number, which runAsNonRoot needs"
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"]) == tuple(map(int, user.groups()))
    options = options_of(container["args"])
    assert options["--port"] == str(container["ports"][0]["containerPort"])
    assert re.search(rf"^EXPOSE {options['--port']}$", DOCKERFILE, re.M)
    assert float(options["--num-threads"]) == float(container["resources"]["limits"]["cpu"])
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert mounts["model"] == container["args"][0]
    assert f"PATCHWORD_CACHE={mounts['cache']}\n" in DOCKERFILE
    for probe, path in (("startupProbe", "/readyz"), ("readinessProbe", "/readyz"), ("livenessProbe", "/healthz")):
        assert container[probe]["httpGet"]["path"] == path
        assert container[probe]["httpGet"]["port"] in ("http", int(options["--port"]))
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("name", ["compose.yaml", "patchword.service"])
def test_replicas_fit_the_proxy(name: str) -> None:
    """The proxy's limits hold for the servers: it queues what they have no room for, and waits as long as they do."""
    limits, options = Limits(), options_of(COMMANDS[name])
    assert int(haproxy_value("default-server maxconn", r"(\d+)")) == int(options["--queue-size"])
    noticed = float(haproxy_value("fall")) * seconds(haproxy_value("inter")) + seconds(haproxy_value("fastinter"))
    assert noticed < float(options["--drain-seconds"])
    assert seconds(haproxy_value("timeout http-request")) == limits.receive_timeout
    assert seconds(haproxy_value("timeout server")) > limits.receive_timeout + limits.response_timeout
    assert seconds(haproxy_value("pool-purge-delay")) < KEEP_ALIVE_TIMEOUT
    assert int(haproxy_value("req.body_size gt", r"(\d+)")) == limits.max_body_bytes


def test_compose_fits_the_proxy() -> None:
    services = COMPOSE["services"]
    names = set(re.findall(r'"\$\{(\w+)\}"', HAPROXY_CONFIG))
    environment = services["haproxy"]["environment"]
    assert set(environment) <= names
    assert names - set(environment) == {"PATCHWORD_STATS"}, "which stays on its loopback"
    for number in (1, 2):
        host, _, port = environment[f"PATCHWORD_REPLICA_{number}"].partition(":")
        assert options_of(services[host]["command"])["--port"] == port
    assert services["replica1"] == services["replica2"]
    ((published, inside),) = [port.rsplit(":", 1) for port in services["haproxy"]["ports"]]
    assert published.startswith("127.0.0.1:")
    assert environment["PATCHWORD_BIND"].endswith(f":{inside}")


@pytest.mark.skipif(HAPROXY is None, reason=NO_HAPROXY)
def test_haproxy_accepts_its_file() -> None:
    assert HAPROXY
    done = subprocess.run([HAPROXY, "-c", "-f", DEPLOY / "haproxy.cfg"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_its_unit(tmp_path: Path) -> None:
    """`verify` wants the program to exist. The exposure is out of 100; without any hardening it is 96."""
    unit = tmp_path / "patchword.service"
    unit.write_text(UNIT.replace("/opt/patchword/bin/patchword", shutil.which("true") or ""))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=20", unit]
    done = subprocess.run(command, capture_output=True, text=True)
    if "unrecognized option" not in done.stderr:  # before systemd 250
        assert done.returncode == 0, done.stdout


def unshare(folder: Path, *words: str) -> list[str]:
    """A command on a read-only file system without capabilities; only `folder`, which is empty, can be written."""
    mounts = f"mount --bind / / && mount -o remount,bind,ro / && mount -t tmpfs tmpfs '{folder}'"
    drop = "setpriv --no-new-privs --bounding-set=-all --inh-caps=-all"
    return ["unshare", "--mount", "sh", "-c", f'{mounts} && exec {drop} "$@"', "sh", *words]


@pytest.mark.slow
def test_server_on_a_read_only_file_system(tmp_path: Path) -> None:
    """As in a container with readOnlyRootFilesystem, where the cache and /tmp are volumes."""
    probe = unshare(tmp_path, "sh", "-c", f"! touch '{ROOT}/written' 2>/dev/null && touch '{tmp_path}/written'")
    if shutil.which("unshare") is None or subprocess.run(probe, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("a read-only file system needs root and mount namespaces")
    folders = {"PATCHWORD_CACHE": f"{tmp_path}/cache", "TMPDIR": str(tmp_path), "HOME": "/nonexistent"}
    command = [sys.executable, "-m", "patchword", "serve", "patchword:cifar10", "--num-threads", "1", "--port", "0"]
    pipes: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(unshare(tmp_path, *command), env={**os.environ, **folders}, **pipes) as process:
        assert process.stderr
        first = json.loads(process.stderr.readline())
        assert first["event"] == "ready", "it prints nothing else, such as warnings about directories"
        assert http_post(f"{first['url']}/v1/predict?explain=true", content=png(0)).status_code == 200
        process.terminate()
        assert process.wait(TIMEOUT) == 0
