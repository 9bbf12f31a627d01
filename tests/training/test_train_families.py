"""Training every modern family: a few steps, parameter groups, LoRA, progressive resizing, frozen weights."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helpers.families import FAMILY_CONFIGS, family_model
from helpers.tiny_trainer import config as tiny_config
from patchword.checkpoints import Checkpoint, write_checkpoint
from patchword.config import OptimConfig, ProgressiveResizeConfig, ViTConfig
from patchword.data.preprocess import HALF, Preprocess
from patchword.data.sources import ArraySource, DatasetSplits, from_arrays
from patchword.models import build_model
from patchword.models.layers import NoKeyBiasLinear
from patchword.models.lora import LoRALinear, add_lora, merge_lora
from patchword.training.cpu_data_parallel import CPUDataParallel
from patchword.training.distributed import ProcessGroup
from patchword.training.init_model import is_frozen
from patchword.training.optimizers import layer_index, make_optimizers, make_param_groups
from patchword.training.trainer import Trainer

STEPS = 12
COLORS = np.array([(180, 0, 0), (0, 180, 0), (0, 0, 180), (90, 90, 90)], dtype=np.uint8)
all_families = pytest.mark.parametrize("config", FAMILY_CONFIGS.values(), ids=FAMILY_CONFIGS.keys())


def colored_images(count: int) -> ArraySource:
    targets = np.arange(count) % len(COLORS)
    noise = np.random.default_rng(0).integers(0, 60, (count, 16, 16, 3), dtype=np.uint8)
    return from_arrays(noise + COLORS[targets][:, None, None], targets, labels=["red", "green", "blue", "gray"])


@contextmanager
def training(model: ViTConfig, **changes: Any) -> Iterator[Trainer]:
    """A trainer of the model on noisy images of 16 x 16 pixels, whose class is their color."""
    config = tiny_config(
        model=model.replace(image_size=16, patch_size=4), optim=OptimConfig(lr=3e-3), num_threads=1, **changes
    )
    trainer = Trainer(config, DatasetSplits(colored_images(48), colored_images(16)), ProcessGroup(), fresh=True)
    trainer.start_loader()
    try:
        yield trainer
    finally:
        trainer.close()


def losses(trainer: Trainer, steps: int, progress: float = 0.2) -> list[float]:
    return [float(trainer.train_step(progress)["loss"] or math.nan) for _ in range(steps)]


@pytest.mark.slow
@all_families
def test_loss_falls(config: ViTConfig) -> None:
    """From scratch, with weight decay and EMA; the published model computes what the trained one does."""
    with training(config, ema=0.5) as trainer:
        found = losses(trainer, STEPS)
        assert all(map(math.isfinite, found))
        assert found[-1] < 0.5 * found[0]
        published = trainer.checkpoint()
        model, images = published.build_model(), torch.randn(2, 3, 16, 16)
        with torch.no_grad():
            torch.testing.assert_close(model(images), trainer.eval_model.eval()(images), rtol=1e-4, atol=1e-5)
        for module in trainer.model.modules():
            if isinstance(module, NoKeyBiasLinear):
                assert not module.bias.chunk(3)[1].any(), "no step may move the keys' bias"


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILY_CONFIGS)
def test_progressive_resizing(name: str) -> None:
    """The first phase has images of 8 x 8 pixels, the second of 16 x 16."""
    with training(FAMILY_CONFIGS[name], progressive_resize=ProgressiveResizeConfig(scale=0.5, fraction=0.5)) as trainer:
        sizes: list[int] = []
        trainer.model.blocks[0].register_forward_pre_hook(lambda module, inputs: sizes.append(inputs[0].shape[1]))
        assert all(map(math.isfinite, losses(trainer, 2, progress=0.1) + losses(trainer, 2, progress=0.9)))
        assert {size - FAMILY_CONFIGS[name].num_prefix for size in sizes} == {2 * 2, 4 * 4}


def set_of(groups: list[dict[str, Any]], names: dict[int, str]) -> set[str]:
    return {names[id(p)] for group in groups for p in group["params"]}


@all_families
def test_parameter_groups(config: ViTConfig) -> None:
    """Positions, tokens, norms and biases have no weight decay, and Muon gets only matrices of layers."""
    model = build_model(config)
    names = {id(p): n for n, p in model.named_parameters()}
    adamw, muon = make_optimizers(model, OptimConfig(name="muon", weight_decay=0.1))
    in_muon = set_of(muon.param_groups, names)
    decayed = set_of([g for g in (*adamw.param_groups, *muon.param_groups) if g["weight_decay"]], names)
    assert set_of(adamw.param_groups, names) | in_muon == set(names.values())
    modules = dict(model.named_modules())
    linear = {
        n for n in names.values() if isinstance(modules[n.rpartition(".")[0]], nn.Linear) and n.endswith(".weight")
    }
    assert decayed == linear
    assert in_muon == {n for n in linear if n.startswith("blocks.")}


@all_families
def test_layers_are_counted_from_the_input(config: ViTConfig) -> None:
    """Layer-wise learning rates: what precedes the blocks, as norm_pre does, is layer 0."""
    model, depth = build_model(config), config.depth
    before = {n for n, _ in model.named_parameters() if layer_index(n, depth) == 0}
    expected = ("patch_embed.", "positions.", "class_token", "registers", "norm_pre.")
    assert before == {n for n, _ in model.named_parameters() if n.startswith(expected)}
    assert all(is_frozen(name, ("first-third",), depth) for name in before)
    groups = make_param_groups(model, list(model.named_parameters()), OptimConfig(layer_decay=0.5), 1.0)
    names = {id(p): n for n, p in model.named_parameters()}
    lowest = [g for g in groups if g["peak_lr"] == 0.5 ** (depth + 1)]
    assert set_of(lowest, names) == before


@all_families
def test_lora(config: ViTConfig) -> None:
    """Only the updates and the head are trained; merged, they give a plain model with the same outputs."""
    model, images = family_model(config), torch.randn(2, 3, 32, 32)
    expected = model(images)
    add_lora(model, rank=2)
    assert torch.equal(model(images), expected), "the update starts as zero"
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == name.endswith((".up", ".down")) or name.startswith("head."), name
    for module in model.modules():
        if isinstance(module, LoRALinear):
            nn.init.normal_(module.up, std=0.3)
    logits = model.train()(images)
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters() if p.requires_grad)
    merged = family_model(config, seed=1)
    merged.load_state_dict(merge_lora(model.state_dict()))
    assert (logits - expected).abs().max() > 1e-3
    torch.testing.assert_close(merged(images), logits, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(merged(images), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILY_CONFIGS)
def test_cpu_data_parallel(name: str) -> None:
    """Two chunks in two threads give the gradients of the whole batch."""
    with training(FAMILY_CONFIGS[name]) as trainer:
        inputs, found = trainer.prepare_inputs(next(trainer.batches)), []
        parallel = CPUDataParallel(trainer.model, trainer.objective, 2, "fp32")
        try:
            nn.init.normal_(trainer.model.head.weight, std=0.5)
            parallel.backward(inputs, 1.0)
            found = [p.grad.clone() for p in trainer.parameters]
        finally:
            parallel.close()
        trainer.zero_grad()
        trainer.objective(trainer.model, **inputs)[0].backward()
        for gradient, parameter in zip(found, trainer.parameters, strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dinov3", "clip", "pe core", "aimv2"])
def test_fine_tuning_of_a_model_without_a_head(name: str, tmp_path: Path) -> None:
    """The backbone is kept, a new head is fitted on its features, and CLIP's projection is removed."""
    config = FAMILY_CONFIGS[name].replace(num_classes=0)
    weights = dict(family_model(config).state_dict())
    write_checkpoint(tmp_path / "init", Checkpoint(config, weights, Preprocess((32, 32), mean=HALF, std=HALF)))
    with training(config, init=str(tmp_path / "init"), head_init="probe", image_size=(16, 16)) as trainer:
        assert trainer.config.model.num_classes == 4
        assert trainer.config.model.projection_dim is None
        assert torch.equal(trainer.model.get_parameter("blocks.0.mlp.fc1.weight"), weights["blocks.0.mlp.fc1.weight"])
        assert trainer.model.head.weight.any(), "the head was fitted"
        first, second = losses(trainer, 2)
        assert first < 1
        assert math.isfinite(second)


@pytest.mark.slow
def test_training_with_lora() -> None:
    with training(FAMILY_CONFIGS["dinov3"], lora_rank=2) as trainer:
        frozen = trainer.model.blocks[0].mlp.fc1.weight.clone()
        assert all(map(math.isfinite, losses(trainer, 3)))
        assert torch.equal(trainer.model.blocks[0].mlp.fc1.weight, frozen)
        assert trainer.checkpoint().build_model()(torch.randn(1, 3, 16, 16)).isfinite().all()
