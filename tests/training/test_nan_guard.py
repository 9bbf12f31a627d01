"""A number that is none never gets into a run: the step is not made, and what caused it can be met again."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.runs import end_of, tiny
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

BEFORE = 2  # steps that are made before the fault
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0])  # for each class


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slowed down by more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def splits() -> DatasetSplits:
    """Blots: 120 pictures of four classes."""
    noise = np.random.default_rng(0)
    targets = np.arange(120) % 4
    images = noise.integers(0, 100, (120, 8, 8, 1))
    for target, image in zip(targets, images, strict=True):
        image[4 * (target // 2) :][:4, 4 * (target % 2) :][:, :4] += 120
    source = ArraySource(images.astype(np.uint8), ("a", "b", "c", "d"), targets, title="blots")
    return with_validation(DatasetSplits(source), 0.2, seed=0)


def configured(**changes: Any) -> Config:
    return tiny(batch_size=16, steps=12, save_every=3600.0, **changes)


Setting = tuple[int, float, str, str, float]

# How a step is spoiled: in a part of its batch, or in the weights before it. Each cause is a real one: it is met again
# when the step is computed again.


def spoil_pixel(value: float) -> Callable[[Batch], None]:
    def spoil(batch: Batch) -> None:
        batch.images[3, 0, 2, 5] = value

    return spoil


def spoil_label(batch: Batch) -> None:
    batch.targets[1, 0] = float("nan")


def spoil_mlp(model: Any) -> None:
    model.blocks[1].mlp.fc2.weight.mul_(3e38)


def spoil_head(model: Any) -> None:
    """Finite logits that are too far apart for their loss."""
    model.head.bias.copy_(3e38 * SIGNS)


def spoil_gradient(model: Any) -> None:
    """Forwards a small factor meets a large one; backwards the large one comes first."""
    mlp = model.blocks[1].mlp
    mlp.fc1.weight.mul_(1e-30)
    mlp.fc1.bias.zero_()
    mlp.fc2.weight.mul_(1e30)
    model.head.weight.copy_(1e12 * SIGNS[:, None])


def spoil_norm(model: Any) -> None:
    """Every gradient is finite, and their squares are not."""
    model.head.weight.copy_(1e25 * SIGNS[:, None])


IN_BATCH: dict[str, tuple[Callable[[Batch], None], str, str]] = {
    "NaN pixel": (spoil_pixel(float("nan")), "input", "images"),
    "infinite pixel": (spoil_pixel(float("inf")), "input", "images"),
    "minus infinite pixel": (spoil_pixel(-float("inf")), "input", "images"),
    "NaN label": (spoil_label, "input", "targets"),
}
IN_WEIGHTS: dict[str, tuple[Callable[[Any], None], str, str]] = {
    "huge weights": (spoil_mlp, "forward", "blocks.1"),
    "huge loss": (spoil_head, "loss", "loss"),
    "huge gradient": (spoil_gradient, "backward", "blocks.1.mlp.fc1"),
    "huge norm": (spoil_norm, "backward", ""),
}
# accumulate, EMA, stem (whose batch norm has buffers), optimiser, SAM
SETTINGS = [
    (1, 0.0, "linear", "adamw", 0.0),
    (1, 0.98, "conv", "sgd", 0.0),
    (2, 0.98, "linear", "muon", 0.05),
    (2, 0.0, "conv", "adamw", 0.05),
    (2, 0.98, "conv", "muon", 0.0),
    (1, 0.98, "linear", "sgd", 0.05),
]


def make_trainer(splits: DatasetSplits, setting: Setting, **changes: Any) -> Trainer:
    accumulate, ema, stem, optimiser, sam = setting
    model = tiny().model.replace(stem=stem, stem_layers=(8,) if stem == "conv" else ())
    optim = OptimConfig(name=optimiser, sam_rho=sam)  # type: ignore[arg-type]
    config = configured(grad_accum_steps=accumulate, ema=ema, model=model, optim=optim, **changes)
    trainer = Trainer(config, splits, ProcessGroup(), fresh=True)
    trainer.start_loader()
    for _ in range(BEFORE):
        trainer.train_step(0.5)
    return trainer


def bits(trainer: Trainer) -> dict[str, bytes]:
    """Everything that training changes: weights, buffers, averages, optimiser state, and the count of steps."""
    tensors = {f"model.{n}": t for n, t in trainer.model.state_dict().items()} | trainer.state_tensors()
    if trainer.ema is not None:
        tensors |= {f"average.{n}": t for n, t in trainer.ema.model.state_dict().items()}
    return {n: t.detach().numpy().tobytes() for n, t in tensors.items()} | {"step": bytes([trainer.step])}


def failed_step(trainer: Trainer) -> tuple[Fault, dict[str, Tensor]]:
    """The fault, after a look at whether all is as it was before the step."""
    before = bits(trainer)
    with pytest.raises(NonFiniteStepError) as caught:
        trainer.train_step(0.5)
    assert bits(trainer) == before
    assert all(p.grad is None for p in trainer.model.parameters())
    return caught.value.fault, caught.value.batch


def check_replay(folder: Path, trainer: Trainer, fault: Fault, batch: dict[str, Tensor]) -> None:
    written = write_fault(folder, fault, trainer.checkpoint(raw=True), batch, trainer.objective.weights)
    files = {"batch.safetensors", "fault.json", "model.json", "model.safetensors"}
    assert {path.name for path in written.iterdir()} == files  # none of them a pickle
    recorded, again = replay(written)
    assert recorded == fault
    assert again == fault.location
    assert again is not None
    assert len(again.sha256) == 64


def spoiled(batches: Iterator[Batch], number: int, spoil: Callable[[Batch], None]) -> Generator[Batch, None, None]:
    for i, batch in enumerate(batches):
        if i == number:
            spoil(batch)
        yield batch


@pytest.mark.parametrize("cause", IN_BATCH)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "-".join(map(str, s)))
def test_a_bad_batch(splits: DatasetSplits, tmp_path: Path, cause: str, setting: Setting) -> None:
    spoil, where, layer = IN_BATCH[cause]
    trainer = make_trainer(splits, setting)
    bad_part = setting[0] - 1
    names = [splits.train.name(int(i)) for i in trainer.loader.sampler(*part_of(trainer, bad_part))[0]]  # type: ignore
    trainer.batches = spoiled(trainer.batches, bad_part, spoil)
    fault, batch = failed_step(trainer)
    assert fault.location is not None
    assert (fault.location.stage, fault.location.layer) == (where, layer)
    assert (fault.step, fault.micro_batch, fault.samples) == (BEFORE, bad_part, names)
    check_replay(tmp_path, trainer, fault, batch)
    trainer.train_step(0.5)  # the batches after it are good


def part_of(trainer: Trainer, part: int) -> tuple[int, int]:
    """The positions of a part of the next step."""
    return list(itertools.islice(trainer.batch_ranges(trainer.step), part + 1))[part]


@pytest.mark.parametrize("cause", IN_WEIGHTS)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "-".join(map(str, s)))
def test_bad_weights(splits: DatasetSplits, tmp_path: Path, cause: str, setting: Setting) -> None:
    spoil, where, layer = IN_WEIGHTS[cause]
    trainer = make_trainer(splits, setting)
    with torch.no_grad():
        spoil(trainer.model)
    fault, batch = failed_step(trainer)
    assert fault.location is not None
    assert fault.location.stage == where
    assert fault.location.layer.startswith(layer)
    assert fault.step == BEFORE
    assert len(fault.samples) == 16 // setting[0]
    check_replay(tmp_path, trainer, fault, batch)


def test_in_bf16_it_is_looked_for_in_bf16(splits: DatasetSplits, tmp_path: Path) -> None:
    if not probe_capabilities().bf16_works:
        pytest.skip("this processor cannot compute in bf16")
    trainer = make_trainer(splits, SETTINGS[0], precision="bf16")
    spoil, where, layer = next(iter(IN_WEIGHTS.values()))
    with torch.no_grad():
        spoil(trainer.model)
    fault, batch = failed_step(trainer)
    assert fault.precision == "bf16"
    assert fault.location is not None
    assert fault.location.stage == where
    assert fault.location.layer.startswith(layer)
    check_replay(tmp_path, trainer, fault, batch)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "-".join(map(str, s)))
def test_a_gradient_that_goes_wrong_once(splits: DatasetSplits, setting: Setting) -> None:
    """A fault of the machine: nothing is there to be met again, but the step is not made, either."""
    trainer = make_trainer(splits, setting)
    weight = dict(trainer.model.named_parameters())["head.weight"]
    passes = itertools.count(1)
    last = setting[0] * (2 if setting[4] else 1)  # with SAM the weights are then elsewhere
    hook = weight.register_hook(lambda gradient: gradient * (float("inf") if next(passes) == last else 1))
    fault, _ = failed_step(trainer)
    assert fault.location is None
    hook.remove()
    trainer.train_step(0.5)


def test_frozen_weights_and_class_weights(splits: DatasetSplits, tmp_path: Path) -> None:
    """The replay knows nothing of what was frozen, and meets the fault in the same place."""
    trainer = make_trainer(splits, SETTINGS[2], freeze=("head", "norm"), class_weights=True)
    with torch.no_grad():
        spoil_gradient(trainer.model)
    fault, batch = failed_step(trainer)
    check_replay(tmp_path, trainer, fault, batch)


def test_lora(splits: DatasetSplits, tmp_path: Path) -> None:
    trainer = make_trainer(splits, SETTINGS[0], lora_rank=2)
    with torch.no_grad():
        spoil_mlp(trainer.model)
    fault, batch = failed_step(trainer)
    assert fault.location is not None
    assert fault.location.layer.startswith("blocks.1")
    check_replay(tmp_path, trainer, fault, batch)


def test_a_run_stops_keeps_the_cause_and_goes_on(
    splits: DatasetSplits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole road: the message, the fault folder, the same on resumption, and the right end without the cause."""
    config, run = configured(data=tiny().data.replace(num_workers=2)), tmp_path / "run"
    train(config, tmp_path / "undisturbed", splits=splits)
    prepare = Loader.make_train_batch

    def spoil(self: Loader, batch_range: tuple[int, int]) -> Batch:
        batch = prepare(self, batch_range)
        if batch_range[0] == 7 * 16 + 8:  # step 8, second part
            batch.images[0, 0, 0, 0] = float("nan")
        return batch

    with monkeypatch.context() as patched:
        patched.setattr(Loader, "make_train_batch", spoil)
        with pytest.raises(TrainingError) as first:
            train(config, run, splits=splits)
        state = {p.name: sha256(p) for p in (run / "checkpoints/step-00000007").iterdir()}
        rows = (run / "metrics.jsonl").read_bytes()
        with pytest.raises(TrainingError) as second:
            resume(run, splits=splits)
    names = json.loads((run / "faults/step-00000007/fault.json").read_text())["samples"]
    assert str(first.value).startswith(f"Step 8 produced NaN or Inf (input, images) in the batch {names[0]}, ")
    assert names[0].startswith("blots ")
    assert len(names) == 8
    assert str(run / "checkpoints/step-00000007") in str(first.value)
    assert "--optim.lr" in str(first.value)
    assert str(first.value).replace("faults/step-00000007", "faults/step-00000007-2") == str(second.value)
    faults = [replay(folder) for folder in sorted((run / "faults").iterdir())]
    assert len(faults) == 2
    assert faults[0] == faults[1]
    assert faults[0][0].location == faults[0][1]
    assert {p.name: sha256(p) for p in (run / "checkpoints/step-00000007").iterdir()} == state
    assert (run / "metrics.jsonl").read_bytes() == rows
    resume(run, splits=splits)
    assert end_of(run, 12) == end_of(tmp_path / "undisturbed", 12)


def test_a_replay_can_tell_a_difference(splits: DatasetSplits, tmp_path: Path) -> None:
    """A record that says something else than what happens is found out."""
    trainer = make_trainer(splits, SETTINGS[0])
    with torch.no_grad():
        spoil_head(trainer.model)
    fault, batch = failed_step(trainer)
    assert fault.location is not None
    wrong = dataclasses.replace(fault, location=FaultLocation("loss", "loss", "0" * 64))
    recorded, again = replay(write_fault(tmp_path, wrong, trainer.checkpoint(raw=True), batch, None))
    assert recorded.location != again == fault.location
