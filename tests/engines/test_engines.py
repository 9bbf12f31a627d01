"""Engines: each says what torch says, a trial that dies is an answer, and the choice is measured."""

import dataclasses
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.command import run
from helpers.export_checkpoint import TINY, make_checkpoint
from helpers.model_zoo import RESNETS, VITS, random_model
from patchword.checkpoints import Checkpoint, write_checkpoint
from patchword.core.runtime import set_num_threads
from patchword.data.preprocess import HALF, Preprocess
from patchword.engines import ENGINES, Engine, open_engine
from patchword.engines import auto as choose
from patchword.engines import engine_cache as files
from patchword.engines import engine_trials as trial
from patchword.engines.bench import bench_engines
from patchword.engines.engine import EngineSpec
from patchword.engines.parity import compute_logits, measure_parity, sample_images
from patchword.engines.quantize import RowScaledLinear, max_abs_inputs, quantization_errors, scale_outlier_rows, smooth_quant
from patchword.engines.torch_int8 import Int8Linear
from patchword.errors import ConfigError
from patchword.inference.classifier import Classifier
from patchword.models import ViT


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATCHWORD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(trial, "_results", {})
    return tmp_path / "cache"


@pytest.mark.parametrize("name", [name for name in ENGINES if name not in ("torch-compiled", "openvino")])
def test_every_engine_says_what_torch_says(name: str) -> None:
    checkpoint = make_checkpoint(TINY)
    assert checkpoint.preprocess is not None
    pictures = sample_images(checkpoint.preprocess)
    engine = open_engine(name, checkpoint, pictures)
    found = measure_parity(compute_logits(open_engine("torch", checkpoint), pictures), compute_logits(engine, pictures))
    assert found.within_tolerance(ENGINES[name].exact), found
    assert engine(pictures[:1]).shape == (1, 5) and engine(pictures[:7]).shape == (7, 5), "any number of pictures"


@pytest.mark.parametrize("name", ["both", "rotary", "hybrid"])
def test_every_kind_of_model_goes_to_onnx(name: str) -> None:
    checkpoint = make_checkpoint(VITS[name])
    assert checkpoint.preprocess is not None
    pictures = sample_images(checkpoint.preprocess, 5)
    found = measure_parity(open_engine("torch", checkpoint)(pictures), open_engine("onnx", checkpoint)(pictures))
    assert found.within_tolerance(exact=True), found


@pytest.mark.parametrize("name", ["torch-int8", "onnx-int8"])
def test_what_has_no_large_products_is_told(name: str) -> None:
    config = RESNETS["ResNet"]
    tensors = dict(random_model(config).state_dict())
    checkpoint = Checkpoint(config, tensors, Preprocess(config.image_size, mean=HALF, std=HALF))
    with pytest.raises(ConfigError, match="int8 needs a Vision Transformer"):
        open_engine(name, checkpoint)
    found = measure_parity(
        *(open_engine(each, checkpoint)(torch.zeros(2, 32, 32, 3).byte()) for each in ("torch", "onnx"))
    )
    assert found.within_tolerance(exact=True)


def test_several_labels_are_several_decisions() -> None:
    """Softmax would see no difference between logits that differ by a constant; sigmoids do."""
    logits = torch.tensor([[3.0, -2.0], [0.5, 4.0]])
    assert measure_parity(logits, logits + 5).kl_divergence < 1e-9
    found = measure_parity(logits, logits + 5, multi_label=True)
    assert found.kl_divergence > 1
    assert found.top1_agreement == 0.5


@pytest.mark.parametrize("name", ["class", "average", "distilled"])
def test_merged_tokens_go_to_onnx(name: str) -> None:
    """Two mergers, of which the second finds tokens that stand for several; any number of pictures."""
    checkpoint = make_checkpoint(VITS[name])
    assert checkpoint.preprocess is not None
    pictures = sample_images(checkpoint.preprocess, 5)
    engines = [open_engine(each, checkpoint, merge_counts=(4, 4, 0)) for each in ("torch", "onnx")]
    for count in (1, 5):
        wanted, found = (engine(pictures[:count]) for engine in engines)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("child", "why"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "killed by SIGILL"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("raise ImportError('libfoo.so is not there')", "ImportError: libfoo.so is not there"),
        ("print('hello')", "exit code 0"),
        ("import sys; sys.exit(7)", "exit code 7"),
    ],
)
def test_a_trial_that_dies_is_an_answer(child: str, why: str) -> None:
    verdict = trial.run_trial("onnx", child)
    assert not verdict.works
    assert why in verdict.reason


def test_a_trial_that_hangs_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TRIAL_TIMEOUT", 2.0)
    verdict = trial.run_trial("onnx", "import time; time.sleep(3600)")
    assert not verdict.works
    assert "no result within 2 seconds" in verdict.reason


def test_verdicts_that_last_are_remembered(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    died = trial.TrialResult("onnx", False, "its trial was killed by SIGILL", "SIGILL")
    assert trial.run_trial("onnx", "import os, signal; os.kill(os.getpid(), signal.SIGILL)") == died
    monkeypatch.setattr(trial, "_results", {})  # as in another process
    with monkeypatch.context() as patched:
        patched.setattr(trial.subprocess, "run", lambda *_, **__: pytest.fail("tried again"))
        assert trial.run_trials(["onnx"]) == {"onnx": died}
        with pytest.raises(ConfigError, match="does not work on this machine: its trial was killed by SIGILL"):
            Classifier(make_checkpoint(TINY), "onnx")
    for path in (own_cache / "engines").iterdir():
        path.write_text("{")  # damaged: as if it were not there
    assert trial.cached_result("onnx") is None
    trial.run_trial("onnx", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    monkeypatch.setattr(trial, "_results", {})
    assert trial.cached_result("onnx") is None, "want of memory is no verdict"


def test_a_file_of_the_users_is_not_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('not the library')")
    monkeypatch.chdir(tmp_path)
    child = "import torch, sys; sys.exit(0 if hasattr(torch, 'Tensor') else 7)"
    assert "exit code 0" in trial.run_trial("onnx", child).reason


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "onnx", dataclasses.replace(ENGINES["onnx"], requires=("no_such_thing",)))
    assert "pip install -c constraints.txt '.[export]'" in trial.run_trial("onnx").reason
    with pytest.raises(ConfigError, match="no_such_thing"):
        open_engine("onnx", make_checkpoint(TINY))


def working(*names: str) -> dict[str, trial.TrialResult]:
    """Verdicts: the later, the faster."""
    return {name: trial.TrialResult(name, name in names, "", 1.0 + k, 1.0 + k) for k, name in enumerate(ENGINES)}


def test_auto_takes_what_is_fast_and_true(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint(TINY)
    monkeypatch.setattr(choose, "run_trials", lambda: working("torch", "onnx"))
    monkeypatch.setattr(choose, "measure_ranking", lambda *_: ["onnx", "torch"])
    first = choose.select_engine("auto", checkpoint)
    assert first.prepared.name == "onnx"
    assert first.parity is not None
    assert first.parity.top1_agreement == 1
    with monkeypatch.context() as patched:
        patched.setattr(choose, "measure_parity", lambda *_: pytest.fail("compared again"))
        assert choose.select_engine("auto", checkpoint).parity == first.parity
    checkpoint.tensors["head.bias"][0] += 1  # another model: the verdict on the first does not count
    broken = EngineSpec("onnx", "", lambda *_: lambda pixels: torch.randn(len(pixels), 5))
    monkeypatch.setitem(ENGINES, "onnx", broken)
    assert choose.select_engine("auto", checkpoint).prepared.name == "torch", (
        "an engine that says something else is never taken"
    )


def test_what_compiles_for_every_process_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint(TINY)
    monkeypatch.setattr(choose, "rank_engines", lambda _: ["torch-compiled", "torch"])
    monkeypatch.setattr(choose, "try_open", lambda *_: pytest.fail("it was opened"))
    assert choose.select_engine("auto", checkpoint, quick=True).prepared.name == "torch"
    with pytest.raises(ConfigError, match="again in every process"):
        choose.select_engine("torch-compiled", checkpoint, quick=True)


TIMES = {"torch": 0.1, "onnx": 0.01, "torch-int8": 0.5, "openvino-int8": 0.05}  # seconds, on any machine


def simulated_turns(engines: dict[str, Engine], pixels: torch.Tensor, seconds: float) -> dict[str, list[float]]:
    for engine in engines.values():
        engine(pixels)
    return {name: [TIMES[name]] for name in engines}


def test_the_ranking_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint(TINY)
    assert checkpoint.preprocess is not None
    monkeypatch.setattr(choose, "run_trials", lambda: working("torch", "onnx", "torch-int8", "openvino-int8"))
    for name in ("onnx", "torch-int8"):
        kind = EngineSpec(name, "", lambda *_: lambda pixels: torch.zeros(len(pixels), 5), exact=name == "onnx")
        monkeypatch.setitem(ENGINES, name, kind)
    monkeypatch.setattr(choose, "time_interleaved", simulated_turns)
    names = choose.rank_engines(checkpoint)
    assert names[0] == "onnx" and names[-1] == "torch" and "torch-int8" not in names, (
        "in fp32, too; none that is slower"
    )
    monkeypatch.setattr(choose, "measure_ranking", lambda *_: pytest.fail("measured again"))
    assert choose.rank_engines(checkpoint) == names


def counting(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Engines of that name note here each time that their file is made."""
    spec, made = ENGINES[name], []

    def build(*arguments: Any) -> bytes:
        made.append(1)
        assert spec.build is not None
        return spec.build(*arguments)

    monkeypatch.setitem(ENGINES, name, dataclasses.replace(spec, build=build))
    return made


@pytest.mark.parametrize("name", ["onnx", "onnx-int8", "openvino-int8"])
def test_an_engine_s_file_is_made_once(name: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, made = make_checkpoint(TINY), counting(monkeypatch, name)
    assert checkpoint.preprocess is not None
    pictures = sample_images(checkpoint.preprocess, 6)
    said = [open_engine(name, checkpoint)(pictures) for _ in range(2)]
    assert len(made) == 1
    assert torch.equal(*said)
    (file,) = (own_cache / "engines/files").iterdir()
    file.write_bytes(file.read_bytes()[:-9])
    assert torch.equal(open_engine(name, checkpoint)(pictures), said[0]) and len(made) == 2, "damaged: made anew"
    checkpoint.tensors["head.bias"] += 1
    torch.testing.assert_close(
        open_engine(name, checkpoint)(pictures), said[0] + 1 / checkpoint.temperature, atol=1e-3, rtol=0
    )
    assert len(made) == 3


def test_a_cache_that_cannot_be_written_costs_time_only(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache.write_text("not a folder")
    made = counting(monkeypatch, "onnx")
    for _ in range(2):
        open_engine("onnx", make_checkpoint(TINY))
    assert len(made) == 2


def test_a_cache_that_can_only_be_read_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("read only")

    files.store_file("name", b"content")
    monkeypatch.setattr(os, "utime", refuse)
    assert files.load_file("name") == b"content"


def test_files_that_were_not_used_for_longest_go_first(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_CACHE_BYTES", 3000)
    for number, name in enumerate("abc"):
        files.store_file(name, bytes(900))
        os.utime(files.engine_files_dir() / name, (number, number))
    assert files.load_file("a") == bytes(900)  # used again
    files.store_file("d", bytes(900))
    assert sorted(path.name for path in files.engine_files_dir().iterdir()) == ["a", "c", "d"]


def test_threads_that_keep_to_one_core_share_a_session() -> None:
    checkpoint, before = make_checkpoint(TINY), torch.get_num_threads()
    classifier = Classifier(checkpoint, "onnx")
    assert checkpoint.preprocess is not None
    pictures = sample_images(checkpoint.preprocess, 24)
    wanted = compute_logits(open_engine("torch", checkpoint), pictures)
    found: dict[int, torch.Tensor] = {}

    def ask(number: int) -> None:
        set_num_threads(1)
        found[number] = torch.cat([classifier.logits(row[None]) for row in pictures])

    threads = [threading.Thread(target=ask, args=(k,)) for k in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for said in found.values():
        torch.testing.assert_close(said, wanted, atol=1e-3, rtol=1e-3)
    assert len(found) == 4
    assert set(classifier.engine.sessions) == {1, before}
    torch.set_num_threads(before)  # the setting of a thread leaks into threads that start later


def test_smoothing_changes_nothing_but_the_ranges() -> None:
    """A channel that is a hundred times as large as the others no longer sticks out; answers stay."""
    checkpoint = make_checkpoint(TINY)
    assert checkpoint.preprocess is not None
    checkpoint.tensors["blocks.0.norm1.weight"][7] *= 100
    pictures = sample_images(checkpoint.preprocess, 8)
    smooth = smooth_quant(checkpoint, pictures)
    torch.testing.assert_close(
        open_engine("torch", smooth)(pictures), open_engine("torch", checkpoint)(pictures), atol=1e-4, rtol=1e-3
    )
    images, name = checkpoint.preprocess.normalize(pictures), "blocks.0.attention.qkv"
    spread = []
    for each in (checkpoint, smooth):
        model = each.build_model()
        assert isinstance(model, ViT)
        sizes = max_abs_inputs(model, [name], images)[name]
        spread.append(float(sizes.max() / sizes.median()))
    assert spread[1] < spread[0] / 5


def test_layers_with_outlying_rows_are_found_and_scaled() -> None:
    """The class token enters the second MLP's last layer a thousand times as large as the patches."""
    checkpoint = make_checkpoint(TINY)
    assert checkpoint.preprocess is not None
    model = checkpoint.build_model()
    assert isinstance(model, ViT)
    images = checkpoint.preprocess.normalize(sample_images(checkpoint.preprocess, 8))

    def swell(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (inputs[0] * torch.where(torch.arange(inputs[0].shape[1]) == 0, 1000.0, 1.0)[:, None],)

    model.blocks[1].mlp.fc2.register_forward_pre_hook(swell)  # type: ignore[union-attr]
    errors = quantization_errors(model, images)
    worst = max(errors, key=lambda name: errors[name])
    assert worst == "blocks.1.mlp.fc2"
    assert errors[worst] > 10 * sorted(errors.values())[-2]
    with torch.no_grad():
        before = checkpoint.build_model()(images)
        fresh = checkpoint.build_model()
        fresh.blocks[1].mlp.fc2 = RowScaledLinear(fresh.blocks[1].mlp.fc2)  # type: ignore[union-attr,index]
        torch.testing.assert_close(fresh(images), before, atol=1e-4, rtol=1e-3)
    assert scale_outlier_rows(model, images)[-1:] == ["blocks.1.mlp.fc2"]


def test_int8_keeps_what_a_real_model_knows(ti16: Path, imagenet: Path) -> None:
    """One layer of ViT-Ti/16 has rows that stick out: without a remedy int8 agrees on 84 of 100 pictures."""
    files = sorted(imagenet.rglob("*.jpg"))[::16]
    plain, small = Classifier.load(ti16), Classifier.load(ti16, engine="onnx-int8")
    rows = [torch.stack([r for r in each.stream(files) if isinstance(r, torch.Tensor)]) for each in (plain, small)]
    found = measure_parity(*rows)
    assert found.num_images >= 60 and found.top1_agreement > 0.9 and found.kl_divergence < 0.04, found


def test_int8_rounds_by_token_and_channel() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 32)
    x = torch.randn(2, 5, 64) * torch.tensor([0.01, 1.0, 100.0, 1.0, 1.0]).view(5, 1)  # tokens of very different size
    off = (Int8Linear(linear)(x) - linear(x)).norm(dim=-1) / linear(x).norm(dim=-1)
    assert off.max() < 0.03, "a large token does not blur a small one"


def test_bench_measures_every_engine() -> None:
    checkpoint = make_checkpoint(TINY)
    assert checkpoint.preprocess is not None
    rows = bench_engines(checkpoint, ["torch", "onnx"], sample_images(checkpoint.preprocess, 8), 0.05, (1, 4))
    assert [row.name for row in rows] == ["torch", "onnx"]
    for row in rows:
        assert [t.batch_size for t in row.timings] == [1, 4]
        assert row.parity is not None
        assert row.parity.top1_agreement == 1.0
        assert all(0 < t.median_ms <= t.p95_ms <= t.p99_ms and t.num_rounds >= 5 for t in row.timings)


def test_the_commands(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", make_checkpoint(TINY))
    asked = ("--engines", "torch", "--seconds", 0.05)
    done = run("bench", tmp_path / "model", *asked, "--json", "--out", tmp_path / "page")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["name"] == "torch"
    assert row["parity"]["top1_agreement"] == 1.0
    assert row["timings"][0]["images_per_second"] > 1
    assert (tmp_path / "page/report.html").exists()
    assert (tmp_path / "page/engines.png").exists()
    done = run("bench", tmp_path / "model", "--engines", "warp")
    assert done.returncode == 2
    assert "There is no engine 'warp'" in done.stderr
