"""Engines: parity with torch, trials that crash, automatic selection, caches and quantization."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from helpers.command import run
from helpers.export_checkpoint import TINY, make_checkpoint
from helpers.model_zoo import RESNETS, VITS, random_model
from patchword.checkpoints import Checkpoint, write_checkpoint
from patchword.core.runtime import set_num_threads
from patchword.data.preprocess import HALF, Preprocess
from patchword.engines import ENGINES, Engine, auto, engine_cache, engine_trials, open_engine
from patchword.engines.bench import bench_engines
from patchword.engines.engine import EngineSpec
from patchword.engines.engine_trials import TrialResult
from patchword.engines.int8_linear import Int8Linear
from patchword.engines.int8_quantization import (
    RowScaledLinear,
    max_abs_inputs,
    quantization_errors,
    scale_outlier_rows,
    smooth_quant,
)
from patchword.engines.parity import compute_logits, measure_parity, sample_images
from patchword.errors import ConfigError
from patchword.inference.classifier import Classifier
from patchword.models import ViT


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATCHWORD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(engine_trials, "_results", {})
    return tmp_path / "cache"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ENGINES if name not in ("torch-compiled", "openvino")])
def test_every_engine_agrees_with_torch(name: str) -> None:
    checkpoint = make_checkpoint(TINY)
    assert checkpoint.preprocess is not None
    images = sample_images(checkpoint.preprocess)
    engine = open_engine(name, checkpoint, images)
    parity = measure_parity(compute_logits(open_engine("torch", checkpoint), images), compute_logits(engine, images))
    assert parity.within_tolerance(ENGINES[name].exact), parity
    assert [engine(images[:count]).shape for count in (1, 7)] == [(1, 5), (7, 5)], "the batch size is dynamic"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["both", "rotary", "hybrid"])
def test_every_architecture_exports_to_onnx(name: str) -> None:
    checkpoint = make_checkpoint(VITS[name])
    assert checkpoint.preprocess is not None
    images = sample_images(checkpoint.preprocess, 5)
    parity = measure_parity(open_engine("torch", checkpoint)(images), open_engine("onnx", checkpoint)(images))
    assert parity.within_tolerance(exact=True), parity


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch-int8", "onnx-int8"])
def test_int8_rejects_models_without_transformer_blocks(name: str) -> None:
    config = RESNETS["ResNet"]
    tensors = dict(random_model(config).state_dict())
    checkpoint = Checkpoint(config, tensors, Preprocess(config.image_size, mean=HALF, std=HALF))
    with pytest.raises(ConfigError, match="int8 .*Vision Transformer"):
        open_engine(name, checkpoint)
    parity = measure_parity(
        *(open_engine(engine, checkpoint)(torch.zeros(2, 32, 32, 3).byte()) for engine in ("torch", "onnx"))
    )
    assert parity.within_tolerance(exact=True)


def test_multi_label_parity_uses_sigmoids() -> None:
    """Softmax ignores a constant added to all logits; sigmoids do not."""
    logits = torch.tensor([[3.0, -2.0], [0.5, 4.0]])
    assert measure_parity(logits, logits + 5).kl_divergence < 1e-9
    parity = measure_parity(logits, logits + 5, multi_label=True)
    assert parity.kl_divergence > 1
    assert parity.top1_agreement == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["class", "average", "distilled"])
def test_token_merging_exports_to_onnx(name: str) -> None:
    """Two blocks merge, the second one tokens that were merged before; the batch size is dynamic."""
    checkpoint = make_checkpoint(VITS[name])
    assert checkpoint.preprocess is not None
    images = sample_images(checkpoint.preprocess, 5)
    engines = [open_engine(engine, checkpoint, merge_counts=(4, 4, 0)) for engine in ("torch", "onnx")]
    for count in (1, 5):
        expected, actual = (engine(images[:count]) for engine in engines)
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "SIGILL"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("raise ImportError('libfoo.so')", "ImportError: libfoo.so"),
        ("print('hello')", "exit code 0"),
        ("import sys; sys.exit(7)", "exit code 7"),
    ],
)
def test_trial_that_crashes_has_a_result(script: str, reason: str) -> None:
    result = engine_trials.run_trial("onnx", script)
    assert not result.works
    assert reason in result.reason


@pytest.mark.slow
def test_trial_that_hangs_has_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_trials, "TRIAL_TIMEOUT", 2.0)
    result = engine_trials.run_trial("onnx", "import time; time.sleep(3600)")
    assert not result.works
    assert "2 seconds" in result.reason


def test_permanent_results_are_cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crashed = engine_trials.run_trial("onnx", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert (crashed.works, crashed.signal) == (False, "SIGILL")
    monkeypatch.setattr(engine_trials, "_results", {})  # as in another process
    with monkeypatch.context() as patched:
        patched.setattr(engine_trials.subprocess, "run", lambda *_, **__: pytest.fail("ran again"))
        assert engine_trials.run_trials(["onnx"]) == {"onnx": crashed}
        with pytest.raises(ConfigError, match=r"\bonnx .*SIGILL.*patchword doctor"):
            Classifier(make_checkpoint(TINY), "onnx")
    for path in (cache / "engines").iterdir():
        path.write_text("{")  # damaged: ignored
    assert engine_trials.cached_result("onnx") is None
    engine_trials.run_trial("onnx", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    monkeypatch.setattr(engine_trials, "_results", {})
    assert engine_trials.cached_result("onnx") is None, "a process killed for lack of memory may work the next time"


def test_working_directory_does_not_shadow_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('not the library')")
    monkeypatch.chdir(tmp_path)
    script = "import torch, sys; sys.exit(0 if hasattr(torch, 'Tensor') else 7)"
    assert "exit code 0" in engine_trials.run_trial("onnx", script).reason


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "onnx", dataclasses.replace(ENGINES["onnx"], requires=("no_such_library",)))
    assert "pip install -c constraints.txt '.[export]'" in engine_trials.run_trial("onnx").reason
    with pytest.raises(ConfigError, match="no_such_library"):
        open_engine("onnx", make_checkpoint(TINY))


def trial_results(*names: str) -> dict[str, TrialResult]:
    """Results in which later engines are faster."""
    return {
        name: TrialResult(name, name in names, throughput_batch_1=1.0 + k, throughput_batch_16=1.0 + k)
        for k, name in enumerate(ENGINES)
    }


@pytest.mark.slow
def test_auto_selects_a_fast_engine_that_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint(TINY)
    monkeypatch.setattr(auto, "run_trials", lambda: trial_results("torch", "onnx"))
    monkeypatch.setattr(auto, "measure_ranking", lambda *_: ["onnx", "torch"])
    first = auto.select_engine("auto", checkpoint)
    assert first.prepared.name == "onnx"
    assert first.parity is not None
    assert first.parity.top1_agreement == 1
    with monkeypatch.context() as patched:
        patched.setattr(auto, "measure_parity", lambda *_: pytest.fail("measured again"))
        assert auto.select_engine("auto", checkpoint).parity == first.parity
    checkpoint.tensors["head.bias"][0] += 1  # another model: the cached parity does not apply
    broken = EngineSpec("onnx", "", lambda *_: lambda pixels: torch.randn(len(pixels), 5))
    monkeypatch.setitem(ENGINES, "onnx", broken)
    assert auto.select_engine("auto", checkpoint).prepared.name == "torch", (
        "an engine with other predictions is never selected"
    )


def test_quick_selection_excludes_engines_that_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint(TINY)
    monkeypatch.setattr(auto, "rank_engines", lambda _: ["torch-compiled", "torch"])
    monkeypatch.setattr(auto, "try_open", lambda *_: pytest.fail("it was opened"))
    assert auto.select_engine("auto", checkpoint, quick=True).prepared.name == "torch"
    with pytest.raises(ConfigError, match="torch-compiled .*compile .*auto"):
        auto.select_engine("torch-compiled", checkpoint, quick=True)


TIMES = {"torch": 0.1, "onnx": 0.01, "torch-int8": 0.5, "openvino-int8": 0.05}  # seconds, on any machine


def simulated_timing(engines: dict[str, Engine], pixels: torch.Tensor, seconds: float) -> dict[str, list[float]]:
    for engine in engines.values():
        engine(pixels)
    return {name: [TIMES[name]] for name in engines}


@pytest.mark.slow
def test_ranking_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint(TINY)
    assert checkpoint.preprocess is not None
    monkeypatch.setattr(auto, "run_trials", lambda: trial_results("torch", "onnx", "torch-int8", "openvino-int8"))
    for name in ("onnx", "torch-int8"):
        spec = EngineSpec(name, "", lambda *_: lambda pixels: torch.zeros(len(pixels), 5), exact=name == "onnx")
        monkeypatch.setitem(ENGINES, name, spec)
    monkeypatch.setattr(auto, "time_interleaved", simulated_timing)
    names = auto.rank_engines(checkpoint)
    assert (names[0], names[-1]) == ("onnx", "torch")
    assert "torch-int8" not in names, "slower than torch"
    monkeypatch.setattr(auto, "measure_ranking", lambda *_: pytest.fail("measured again"))
    assert auto.rank_engines(checkpoint) == names


def count_builds(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Returns a list that grows each time the file of this engine is built."""
    spec, builds = ENGINES[name], []

    def build(*arguments: Any) -> bytes:
        builds.append(1)
        assert spec.build is not None
        return spec.build(*arguments)

    monkeypatch.setitem(ENGINES, name, dataclasses.replace(spec, build=build))
    return builds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["onnx", "onnx-int8", "openvino-int8"])
def test_engine_file_is_built_once(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, builds = make_checkpoint(TINY), count_builds(monkeypatch, name)
    assert checkpoint.preprocess is not None
    images = sample_images(checkpoint.preprocess, 6)
    logits = [open_engine(name, checkpoint)(images) for _ in range(2)]
    assert len(builds) == 1
    assert torch.equal(*logits)
    (file,) = (cache / "engines/files").iterdir()
    file.write_bytes(file.read_bytes()[:-9])
    assert torch.equal(open_engine(name, checkpoint)(images), logits[0])
    assert len(builds) == 2, "a damaged file is built again"
    checkpoint.tensors["head.bias"] += 1
    torch.testing.assert_close(
        open_engine(name, checkpoint)(images), logits[0] + 1 / checkpoint.temperature, atol=1e-3, rtol=0
    )
    assert len(builds) == 3


@pytest.mark.slow
def test_unwritable_cache_is_ignored(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("not a folder")
    builds = count_builds(monkeypatch, "onnx")
    for _ in range(2):
        open_engine("onnx", make_checkpoint(TINY))
    assert len(builds) == 2


def test_read_only_cache_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("read only")

    engine_cache.store_file("name", b"content")
    monkeypatch.setattr(os, "utime", refuse)
    assert engine_cache.load_file("name") == b"content"


def test_least_recently_used_files_are_evicted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_cache, "MAX_CACHE_BYTES", 3000)
    for number, name in enumerate("abc"):
        engine_cache.store_file(name, bytes(900))
        os.utime(engine_cache.engine_files_dir() / name, (number, number))
    assert engine_cache.load_file("a") == bytes(900)  # now the most recently used
    engine_cache.store_file("d", bytes(900))
    assert sorted(path.name for path in engine_cache.engine_files_dir().iterdir()) == ["a", "c", "d"]


@pytest.mark.slow
def test_single_threaded_callers_share_a_session() -> None:
    checkpoint, before = make_checkpoint(TINY), torch.get_num_threads()
    classifier = Classifier(checkpoint, "onnx")
    assert checkpoint.preprocess is not None
    images = sample_images(checkpoint.preprocess, 24)
    expected = compute_logits(open_engine("torch", checkpoint), images)
    results: dict[int, torch.Tensor] = {}

    def classify(number: int) -> None:
        set_num_threads(1)
        results[number] = torch.cat([classifier.logits(row[None]) for row in images])

    threads = [threading.Thread(target=classify, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for logits in results.values():
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
    assert len(results) == 4
    assert set(classifier.engine.sessions) == {1, before}
    torch.set_num_threads(before)  # the setting leaks into threads that start later


def test_smooth_quant_changes_only_quantization_ranges() -> None:
    """An outlier channel no longer dominates; logits stay the same."""
    checkpoint = make_checkpoint(TINY)
    assert checkpoint.preprocess is not None
    checkpoint.tensors["blocks.0.norm1.weight"][7] *= 100
    images = sample_images(checkpoint.preprocess, 8)
    smooth = smooth_quant(checkpoint, images)
    torch.testing.assert_close(
        open_engine("torch", smooth)(images), open_engine("torch", checkpoint)(images), atol=1e-4, rtol=1e-3
    )
    images, name = checkpoint.preprocess.normalize(images), "blocks.0.attention.qkv"
    spread = []
    for version in (checkpoint, smooth):
        model = version.build_model()
        assert isinstance(model, ViT)
        sizes = max_abs_inputs(model, [name], images)[name]
        spread.append(float(sizes.max() / sizes.median()))
    assert spread[1] < spread[0] / 5


def test_layers_with_outlier_rows_are_scaled() -> None:
    """The input of the second MLP's last layer has a class token a thousand times larger than the patches."""
    checkpoint = make_checkpoint(TINY)
    assert checkpoint.preprocess is not None
    model = checkpoint.build_model()
    assert isinstance(model, ViT)
    images = checkpoint.preprocess.normalize(sample_images(checkpoint.preprocess, 8))

    def enlarge_class_token(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (inputs[0] * torch.where(torch.arange(inputs[0].shape[1]) == 0, 1000.0, 1.0)[:, None],)

    model.blocks[1].mlp.fc2.register_forward_pre_hook(enlarge_class_token)  # type: ignore[union-attr]
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


@pytest.mark.slow
def test_int8_parity_of_a_real_model(ti16: Path, imagenet: Path) -> None:
    """One layer of ViT-Ti/16 has outlier rows: unless they are scaled, int8 agrees on only 84 of 100 images."""
    files = sorted(imagenet.rglob("*.jpg"))[::16]
    plain, quantized = Classifier.load(ti16), Classifier.load(ti16, engine="onnx-int8")
    rows = [torch.stack([r for r in c.stream(files) if isinstance(r, torch.Tensor)]) for c in (plain, quantized)]
    parity = measure_parity(*rows)
    assert parity.num_images >= 60
    assert parity.top1_agreement > 0.9
    assert parity.kl_divergence < 0.04


def test_torch_int8_quantizes_per_token() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 32)
    x = torch.randn(2, 5, 64) * torch.tensor([0.01, 1.0, 100.0, 1.0, 1.0]).view(5, 1)  # tokens of very different scale
    error = (Int8Linear(linear)(x) - linear(x)).norm(dim=-1) / linear(x).norm(dim=-1)
    assert error.max() < 0.03, "large tokens do not affect small ones"


@pytest.mark.slow
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


@pytest.mark.slow
def test_bench_command(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", make_checkpoint(TINY))
    options = ("--engines", "torch", "--seconds", 0.05)
    done = run("bench", tmp_path / "model", *options, "--json", "--out", tmp_path / "report")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["name"] == "torch"
    assert row["parity"]["top1_agreement"] == 1.0
    assert row["timings"][0]["images_per_second"] > 1
    assert (tmp_path / "report/report.html").exists()
    assert (tmp_path / "report/engines.png").exists()
    done = run("bench", tmp_path / "model", "--engines", "warp")
    assert done.returncode == 2
    assert re.search(r"--engines: .*'warp'.*\btorch\b", done.stderr), done.stderr


@pytest.mark.parametrize(("name", "suggestion"), [("onnx-static", "onnx-int8-static"), ("onx", "onnx")])
def test_unknown_engine(name: str, suggestion: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.* {suggestion}\?"):
        open_engine(name, make_checkpoint(TINY))


NO_CONNECTION = """
import sys

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        print(event, arguments[1:] if event == "socket.connect" else arguments[0])

sys.addaudithook(refuse)
from patchword.cli.main import main
sys.exit(main(["predict", "patchword:cifar10", sys.argv[1], "--engine", sys.argv[2], "--json"]))
"""


@pytest.mark.slow
def test_openvino_and_nncf_send_no_telemetry(tmp_path: Path) -> None:
    Image.effect_noise((40, 40), 60).convert("RGB").save(tmp_path / "image.png")
    environment = os.environ | {"HOME": str(tmp_path), "PATCHWORD_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", NO_CONNECTION, str(tmp_path / "image.png"), "openvino-int8"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert len(json.loads(result.stdout)) == 1, "an event of the audit hook would precede the JSON"
    assert not (tmp_path / "intel").exists(), "a client ID was written"
