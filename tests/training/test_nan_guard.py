"""NaN and Inf never enter the weights: the step is discarded, and its cause is saved and can be replayed."""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.runs import final_state, tiny_config
from patchword.config import Config, OptimConfig
from patchword.core.io import sha256
from patchword.data.loader import Batch, Loader
from patchword.data.resolve import with_validation
from patchword.data.sources import ArraySource, DatasetSplits
from patchword.engines.capabilities import probe_capabilities
from patchword.errors import TrainingError
from patchword.training import resume, train
from patchword.training.distributed import ProcessGroup
from patchword.training.nan_guard import Fault, FaultLocation, replay, write_fault
from patchword.training.trainer import NonFiniteStepError, Trainer

NUM_GOOD_STEPS = 2  # before the fault
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0])  # one for each class


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """More threads slow down such small models."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def splits() -> DatasetSplits:
    """120 images of four classes, which differ in the bright quadrant."""
    rng = np.random.default_rng(0)
    targets = np.arange(120) % 4
    images = rng.integers(0, 100, (120, 8, 8, 1))
    for target, image in zip(targets, images, strict=True):
        image[4 * (target // 2) :][:4, 4 * (target % 2) :][:, :4] += 120
    source = ArraySource(images.astype(np.uint8), ("a", "b", "c", "d"), targets, title="quadrants")
    return with_validation(DatasetSplits(source), 0.2, seed=0)


def make_config(**changes: Any) -> Config:
    return tiny_config(batch_size=16, steps=12, save_every=3600.0, **changes)


Setting = tuple[int, float, str, str, float]

# What makes a step non-finite: a micro-batch, or the weights before the step. Each cause is reproducible: computing the
# step again gives the same fault.


def corrupt_pixel(value: float) -> Callable[[Batch], None]:
    def corrupt(batch: Batch) -> None:
        batch.images[3, 0, 2, 5] = value

    return corrupt


def corrupt_label(batch: Batch) -> None:
    batch.targets[1, 0] = float("nan")


def corrupt_mlp(model: Any) -> None:
    model.blocks[1].mlp.fc2.weight.mul_(3e38)


def corrupt_head(model: Any) -> None:
    """Finite logits whose difference overflows in the loss."""
    model.head.bias.copy_(3e38 * SIGNS)


def corrupt_gradient(model: Any) -> None:
    """In the forward pass a tiny factor precedes a huge one; in the backward pass the huge one comes first."""
    mlp = model.blocks[1].mlp
    mlp.fc1.weight.mul_(1e-30)
    mlp.fc1.bias.zero_()
    mlp.fc2.weight.mul_(1e30)
    model.head.weight.copy_(1e12 * SIGNS[:, None])


def corrupt_norm(model: Any) -> None:
    """All gradients are finite, but their squares overflow."""
    model.head.weight.copy_(1e25 * SIGNS[:, None])


BATCH_CAUSES: dict[str, tuple[Callable[[Batch], None], str, str]] = {
    "NaN pixel": (corrupt_pixel(float("nan")), "input", "images"),
    "infinite pixel": (corrupt_pixel(float("inf")), "input", "images"),
    "negative infinite pixel": (corrupt_pixel(-float("inf")), "input", "images"),
    "NaN label": (corrupt_label, "input", "targets"),
}
WEIGHT_CAUSES: dict[str, tuple[Callable[[Any], None], str, str]] = {
    "huge weights": (corrupt_mlp, "forward", "blocks.1"),
    "huge loss": (corrupt_head, "loss", "loss"),
    "huge gradient": (corrupt_gradient, "backward", "blocks.1.mlp.fc1"),
    "huge norm": (corrupt_norm, "backward", ""),
}
# grad_accum_steps, ema, stem (the convolutional one has batch norm buffers), optimizer, sam_rho
SETTINGS = [
    (1, 0.0, "linear", "adamw", 0.0),
    (1, 0.98, "conv", "sgd", 0.0),
    (2, 0.98, "linear", "muon", 0.05),
    (2, 0.0, "conv", "adamw", 0.05),
    (2, 0.98, "conv", "muon", 0.0),
    (1, 0.98, "linear", "sgd", 0.05),
]


def make_trainer(splits: DatasetSplits, setting: Setting, **changes: Any) -> Trainer:
    grad_accum_steps, ema, stem, optimizer, sam_rho = setting
    model = tiny_config().model.replace(stem=stem, stem_layers=(8,) if stem == "conv" else ())
    optim = OptimConfig(name=optimizer, sam_rho=sam_rho)  # type: ignore[arg-type]
    config = make_config(grad_accum_steps=grad_accum_steps, ema=ema, model=model, optim=optim, **changes)
    trainer = Trainer(config, splits, ProcessGroup(), fresh=True)
    trainer.start_loader()
    for _ in range(NUM_GOOD_STEPS):
        trainer.train_step(0.5)
    return trainer


def state_bytes(trainer: Trainer) -> dict[str, bytes]:
    """Return everything that a step changes: weights, buffers, EMA, optimizer state and step number."""
    tensors = {f"model.{n}": t for n, t in trainer.model.state_dict().items()} | trainer.state_tensors()
    if trainer.ema is not None:
        tensors |= {f"ema.{n}": t for n, t in trainer.ema.model.state_dict().items()}
    return {n: t.detach().numpy().tobytes() for n, t in tensors.items()} | {"step": bytes([trainer.step])}


def fail_step(trainer: Trainer) -> tuple[Fault, dict[str, Tensor]]:
    """Make a step that must fail and leave the state unchanged; return the fault and its batch."""
    before = state_bytes(trainer)
    with pytest.raises(NonFiniteStepError) as error:
        trainer.train_step(0.5)
    assert state_bytes(trainer) == before
    assert all(p.grad is None for p in trainer.model.parameters())
    return error.value.fault, error.value.batch


def check_replay(folder: Path, trainer: Trainer, fault: Fault, batch: dict[str, Tensor]) -> None:
    written = write_fault(folder, fault, trainer.checkpoint(raw=True), batch, trainer.objective.weights)
    files = {"batch.safetensors", "fault.json", "model.json", "model.safetensors"}
    assert {path.name for path in written.iterdir()} == files  # none is a pickle
    recorded, location = replay(written)
    assert recorded == fault
    assert location == fault.location
    assert location is not None
    assert len(location.sha256) == 64


def corrupt_one(
    batches: Iterator[Batch], number: int, corrupt: Callable[[Batch], None]
) -> Generator[Batch, None, None]:
    for i, batch in enumerate(batches):
        if i == number:
            corrupt(batch)
        yield batch


@pytest.mark.parametrize("cause", BATCH_CAUSES)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "-".join(map(str, s)))
def test_nan_batch_is_discarded_and_replayed(
    splits: DatasetSplits, tmp_path: Path, cause: str, setting: Setting
) -> None:
    corrupt, stage, layer = BATCH_CAUSES[cause]
    trainer = make_trainer(splits, setting)
    micro_batch = setting[0] - 1
    positions = micro_batch_range(trainer, micro_batch)
    names = [splits.train.name(int(i)) for i in trainer.loader.sampler(*positions)[0]]  # type: ignore
    trainer.batches = corrupt_one(trainer.batches, micro_batch, corrupt)
    fault, batch = fail_step(trainer)
    assert fault.location is not None
    assert (fault.location.stage, fault.location.layer) == (stage, layer)
    assert (fault.step, fault.micro_batch, fault.samples) == (NUM_GOOD_STEPS, micro_batch, names)
    check_replay(tmp_path, trainer, fault, batch)
    trainer.train_step(0.5)  # later batches are good


def micro_batch_range(trainer: Trainer, number: int) -> tuple[int, int]:
    """Return the sample positions of a micro-batch of the next step."""
    return list(itertools.islice(trainer.batch_ranges(trainer.step), number + 1))[number]


@pytest.mark.slow
@pytest.mark.parametrize("cause", WEIGHT_CAUSES)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "-".join(map(str, s)))
def test_overflow_from_weights_is_located_and_replayed(
    splits: DatasetSplits, tmp_path: Path, cause: str, setting: Setting
) -> None:
    corrupt, stage, layer = WEIGHT_CAUSES[cause]
    trainer = make_trainer(splits, setting)
    with torch.no_grad():
        corrupt(trainer.model)
    fault, batch = fail_step(trainer)
    assert fault.location is not None
    assert fault.location.stage == stage
    assert fault.location.layer.startswith(layer)
    assert fault.step == NUM_GOOD_STEPS
    assert len(fault.samples) == 16 // setting[0]
    check_replay(tmp_path, trainer, fault, batch)


def test_fault_in_bf16_is_replayed_in_bf16(splits: DatasetSplits, tmp_path: Path) -> None:
    if not probe_capabilities().bf16_works:
        pytest.skip("this CPU does not support bf16")
    trainer = make_trainer(splits, SETTINGS[0], precision="bf16")
    corrupt, stage, layer = next(iter(WEIGHT_CAUSES.values()))
    with torch.no_grad():
        corrupt(trainer.model)
    fault, batch = fail_step(trainer)
    assert fault.precision == "bf16"
    assert fault.location is not None
    assert fault.location.stage == stage
    assert fault.location.layer.startswith(layer)
    check_replay(tmp_path, trainer, fault, batch)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "-".join(map(str, s)))
def test_irreproducible_inf_gradient_discards_step(splits: DatasetSplits, setting: Setting) -> None:
    """Like a hardware error: the fault has no location, but the step is discarded all the same."""
    trainer = make_trainer(splits, setting)
    weight = dict(trainer.model.named_parameters())["head.weight"]
    passes = itertools.count(1)
    last = setting[0] * (2 if setting[4] else 1)  # the last pass with SAM is at perturbed weights
    hook = weight.register_hook(lambda gradient: gradient * (float("inf") if next(passes) == last else 1))
    fault, _ = fail_step(trainer)
    assert fault.location is None
    hook.remove()
    trainer.train_step(0.5)


def test_fault_with_frozen_and_class_weights_is_replayed(splits: DatasetSplits, tmp_path: Path) -> None:
    """The replay freezes nothing, but finds the fault in the same layer."""
    trainer = make_trainer(splits, SETTINGS[2], freeze=("head", "norm"), class_weights=True)
    with torch.no_grad():
        corrupt_gradient(trainer.model)
    fault, batch = fail_step(trainer)
    check_replay(tmp_path, trainer, fault, batch)


def test_fault_with_lora_is_replayed(splits: DatasetSplits, tmp_path: Path) -> None:
    trainer = make_trainer(splits, SETTINGS[0], lora_rank=2)
    with torch.no_grad():
        corrupt_mlp(trainer.model)
    fault, batch = fail_step(trainer)
    assert fault.location is not None
    assert fault.location.layer.startswith("blocks.1")
    check_replay(tmp_path, trainer, fault, batch)


def test_run_stops_at_nan_and_resumes_without_it(
    splits: DatasetSplits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resuming fails in the same way while the cause persists, and then ends like an uninterrupted run."""
    config, run = make_config(data=tiny_config().data.replace(num_workers=2)), tmp_path / "run"
    train(config, tmp_path / "uninterrupted", splits=splits)
    make_train_batch = Loader.make_train_batch

    def corrupted(self: Loader, batch_range: tuple[int, int]) -> Batch:
        batch = make_train_batch(self, batch_range)
        if batch_range[0] == 7 * 16 + 8:  # step 8, second micro-batch
            batch.images[0, 0, 0, 0] = float("nan")
        return batch

    with monkeypatch.context() as patch:
        patch.setattr(Loader, "make_train_batch", corrupted)
        with pytest.raises(TrainingError) as first:
            train(config, run, splits=splits)
        checksums = {p.name: sha256(p) for p in (run / "checkpoints/step-00000007").iterdir()}
        rows = (run / "metrics.jsonl").read_bytes()
        with pytest.raises(TrainingError) as second:
            resume(run, splits=splits)
    names = json.loads((run / "faults/step-00000007/fault.json").read_text())["samples"]
    assert first.value.code == second.value.code == "not_finite"
    assert re.match(rf"Step 8\b.*\(input, images\).* {re.escape(names[0])}, ", str(first.value))
    assert names[0].startswith("quadrants ")
    assert len(names) == 8
    assert str(run / "checkpoints/step-00000007") in str(first.value)
    assert "--optim.lr" in str(first.value)
    assert str(first.value).replace("faults/step-00000007", "faults/step-00000007-2") == str(second.value)
    faults = [replay(folder) for folder in sorted((run / "faults").iterdir())]
    assert len(faults) == 2
    assert faults[0] == faults[1]
    assert faults[0][0].location == faults[0][1]
    assert {p.name: sha256(p) for p in (run / "checkpoints/step-00000007").iterdir()} == checksums
    assert (run / "metrics.jsonl").read_bytes() == rows
    resume(run, splits=splits)
    assert final_state(run, 12) == final_state(tmp_path / "uninterrupted", 12)


def test_replay_detects_wrong_record(splits: DatasetSplits, tmp_path: Path) -> None:
    trainer = make_trainer(splits, SETTINGS[0])
    with torch.no_grad():
        corrupt_head(trainer.model)
    fault, batch = fail_step(trainer)
    assert fault.location is not None
    wrong = dataclasses.replace(fault, location=FaultLocation("loss", "loss", "0" * 64))
    recorded, location = replay(write_fault(tmp_path, wrong, trainer.checkpoint(raw=True), batch, None))
    assert recorded.location != location == fault.location
