"""Training: recipes, optimizers, fine-tuning, distillation, CPU data parallel, and the files of a run."""

import contextlib
import itertools
import json
import math
import re
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import patchword as pw
from helpers.tiny_trainer import TINY, config, make_splits, stripes
from helpers.tiny_trainer import trainer as make_trainer
from patchword.checkpoints import read_checkpoint, write_checkpoint
from patchword.checkpoints.checkpoint import Checkpoint
from patchword.config import (
    AugmentConfig,
    Config,
    DataConfig,
    DistillConfig,
    OptimConfig,
    ProgressiveResizeConfig,
    ResNetConfig,
    ScheduleConfig,
    ViTConfig,
)
from patchword.config.overrides import apply_overrides, parse_duration
from patchword.data.datasets.imagenet import imagenet_classes
from patchword.data.sources import ArraySource, DatasetSplits, from_arrays
from patchword.engines.capabilities import probe_capabilities
from patchword.errors import CheckpointError, ConfigError, DataError, Stopped, TrainingError
from patchword.models.lora import add_lora, merge_lora
from patchword.recipes import RECIPES, load_recipe
from patchword.training import resume, train
from patchword.training import run as run_module
from patchword.training.budget_clock import BudgetClock
from patchword.training.callbacks import Callback
from patchword.training.distributed import ProcessGroup
from patchword.training.ema import ModelEma
from patchword.training.evaluator import EvalOutputs, evaluate_split
from patchword.training.init_model import freeze
from patchword.training.loss import class_weights, make_objective, match_teacher_classes
from patchword.training.optimizers import SAM, Muon, make_optimizers, newton_schulz, orthogonalize
from patchword.training.run_dir import create_run_dir
from patchword.training.schedule import lr_factor
from patchword.training.trainer import Trainer


def relabeled(source: ArraySource) -> ArraySource:
    """The same images with labels that the head of `teacher` does not have."""
    return from_arrays(source.images, source.targets, labels=tuple("abcd"))


def relabeled_splits() -> DatasetSplits:
    return DatasetSplits(*(relabeled(stripes(count, 16, 3)) for count in (48, 16, 16)))


def losses(trainer: Trainer, steps: int) -> list[float]:
    return [float(trainer.train_step(0.5)["loss"] or 0) for _ in range(steps)]


def shrink_recipe(recipe: Config, teacher: Path) -> Config:
    """The same recipe with a tiny model, and one step on tiny images."""
    if isinstance(recipe.model, ResNetConfig):
        model: Any = recipe.model.replace(image_size=32, layers=(1, 1))
    else:
        dims = {"embed_dim": 32, "depth": 2, "num_heads": 2, "mlp_dim": 32, "in_channels": 3}
        input_fields = {"image_size": 16, "patch_size": 4, "stem": "linear", "stem_layers": ()}
        model = recipe.model.replace(**dims, **input_fields)
    changes: dict[str, Any] = {
        "model": model,
        "batch_size": 4,
        "steps": 1,
        "budget": None,
        "num_threads": 1,
        "loggers": (),
    }
    changes["data"] = recipe.data.replace(num_workers=0)
    if recipe.init:
        changes |= {"init": str(teacher), "image_size": 16}
    if recipe.distill.teacher:
        changes["distill"] = recipe.distill.replace(teacher=str(teacher))
    return recipe.replace(**changes)


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """A small model with the labels of `stripes`."""
    model = TINY.replace(in_channels=3, image_size=16, num_classes=4)
    preprocess = pw.Preprocess((16, 16), mean=(0.5,) * 3, std=(0.5,) * 3)
    torch.manual_seed(0)
    tensors = pw.build_model(model).state_dict()
    tensors["head.weight"] = torch.randn(4, 16)
    labels = tuple(f"stripe {i}" for i in range(4))
    write_checkpoint(tmp_path / "teacher", Checkpoint(model, tensors, preprocess, labels))
    return tmp_path / "teacher"


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_recipe_trains_one_step(name: str, teacher: Path, tmp_path: Path) -> None:
    data = DatasetSplits(stripes(16, 16, 3), stripes(8, 16, 3))
    result = train(shrink_recipe(load_recipe(name), teacher), tmp_path / "run", splits=data)
    assert result is not None
    assert result.steps == 1
    assert pw.Classifier.load(tmp_path / "run").labels == data.train.labels


def test_recipes_are_short_and_document_their_command() -> None:
    recipes_dir = Path(sys.modules["patchword.recipes"].__file__ or "").parent
    for name in RECIPES:
        text = (recipes_dir / f"{name}.py").read_text()
        assert len(text.splitlines()) <= 45 and "Command: " in text, name


def test_recipe_from_user_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from patchword.config import Config\nconfig = Config(name='mine')\n")
    assert load_recipe(str(tmp_path / "mine.py")).name == "mine"
    (tmp_path / "bad.py").write_text("config = 1/0\n")
    with pytest.raises(ConfigError, match=r"bad\.py.*ZeroDivisionError"):
        load_recipe(str(tmp_path / "bad.py"))
    with pytest.raises(ConfigError, match=r"\bfinetune\?"):
        load_recipe("finetun")


@pytest.mark.slow
def test_run_writes_its_files_and_metrics(tmp_path: Path) -> None:
    result = train(config(steps=80, optim=OptimConfig(lr=1e-2)), tmp_path / "run", splits=make_splits())
    assert result is not None
    assert result.metrics["test"]["top1"] == 1.0
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert names == {
        "config.json", "split.json", "metrics.jsonl", "checkpoints", "model.safetensors", "model.json", "report.html",
    }  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    kinds = [row["kind"] for row in rows]
    assert kinds.count("test") == 1
    assert kinds[-1] == "test"
    assert kinds.count("train") == 17
    assert rows[0]["loss"] > 1.2
    assert rows[-3]["loss"] < 0.4
    checkpoint = read_checkpoint(tmp_path / "run")
    assert checkpoint.provenance["metrics"]["test"]["top1"] == 1.0
    assert checkpoint.labels == stripes().labels


def test_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    train(config(steps=1), tmp_path / "run", splits=make_splits())
    with pytest.raises(ConfigError, match=re.escape(f"patchword resume {tmp_path / 'run'}")) as error:
        train(config(steps=1), tmp_path / "run", splits=make_splits())
    assert error.value.code == "run_exists"


def test_failed_start_leaves_no_run_dir(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "weights")) + r"\. .*hf:google/"):
        train(config(init=str(tmp_path / "weights"), steps=1), tmp_path / "run", splits=make_splits())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_number_of_evaluations_is_limited_for_short_epochs(tmp_path: Path) -> None:
    few = DatasetSplits(make_splits().train.subset(np.arange(16)), make_splits().train.subset(np.arange(16, 32)))
    train(config(steps=450, batch_size=16, eval_every=1.0), tmp_path / "run", splits=few)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert 200 <= sum(row["kind"] == "val" for row in rows) <= 226


@pytest.mark.slow
def test_losses_depend_on_seed_but_not_on_num_workers() -> None:
    strong = AugmentConfig(crop="shift", flip=0.5, mixup=0.4, random_erasing=0.3)

    def run(**changes: Any) -> list[float]:
        return losses(make_trainer(model=TINY.replace(dropout=0.1), augment=strong, **changes), 5)

    assert run() == run() == run(data=DataConfig(num_workers=2)) == run(data=DataConfig(num_workers=3))
    assert run() != run(seed=1)


@pytest.mark.slow
def test_gradient_accumulation_keeps_losses() -> None:
    whole, accumulated = losses(make_trainer(), 6), losses(make_trainer(grad_accum_steps=4), 6)
    assert accumulated == pytest.approx(whole, abs=1e-5)


def test_sample_order_is_independent_of_batch_size() -> None:
    def sample_order(size: int) -> list[int]:
        trainer = make_trainer(batch_size=size)
        return [int(i) for _ in range(48 // size * 3) for i in next(trainer.batches).indices]

    assert sample_order(4) == sample_order(16) == sample_order(48)
    assert sorted(sample_order(16)[:48]) == list(range(48))
    assert sample_order(16)[:48] != sample_order(16)[48:96]


def test_balanced_sampling_oversamples_rare_class() -> None:
    source = stripes()
    imbalanced = source.subset(np.flatnonzero((source.targets > 0) | (np.arange(48) < 4)))
    trainer = Trainer(
        config(data=DataConfig(num_workers=0, balanced_sampling=True)),
        DatasetSplits(imbalanced, imbalanced),
        ProcessGroup(),
        fresh=True,
    )
    trainer.start_loader()
    targets = np.concatenate([next(trainer.batches).targets.numpy() for _ in range(30)])
    assert np.bincount(targets).min() > 0.2 * len(targets)


def test_class_weights_are_inverse_frequencies() -> None:
    weights = class_weights(np.array([0, 0, 0, 1]), 3)
    assert weights.tolist() == pytest.approx([2 / 3, 2.0, 0.0])


def test_class_weights_are_independent_of_gradient_accumulation() -> None:
    source = stripes()
    imbalanced = source.subset(np.flatnonzero((source.targets > 0) | (np.arange(48) < 4)))
    results = []
    for grad_accum_steps in (1, 4):
        run_config = config(class_weights=True, grad_accum_steps=grad_accum_steps, num_threads=1)
        trainer = Trainer(run_config, DatasetSplits(imbalanced, imbalanced), ProcessGroup(), fresh=True)
        trainer.start_loader()
        results.append(losses(trainer, 6))
    assert results[1] == pytest.approx(results[0], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("optim", [
    OptimConfig(name="sgd", lr=0.03), OptimConfig(name="muon", lr=1e-2), OptimConfig(lr=1e-2, sam_rho=0.05),
    OptimConfig(lr=1e-2, layer_decay=0.7, head_lr_scale=2.0),
], ids=lambda o: f"{o.name}-{o.sam_rho}-{o.layer_decay}")  # fmt: skip
def test_optimizer_reduces_loss(optim: OptimConfig) -> None:
    values = losses(make_trainer(optim=optim), 180)
    assert np.mean(values[-5:]) < 0.5 * values[0]


def test_param_groups_have_layerwise_lr_and_weight_decay() -> None:
    model = pw.build_model(TINY)
    optim = OptimConfig(lr=1.0, layer_decay=0.5, head_lr_scale=3.0, weight_decay=0.1)
    by_id = {id(p): group for group in make_optimizers(model, optim)[0].param_groups for p in group["params"]}
    groups = {n: by_id[id(p)] for n, p in model.named_parameters()}
    assert groups["head.weight"]["peak_lr"] == 3.0
    assert groups["norm.weight"]["peak_lr"] == 1.0
    assert groups["blocks.1.mlp.fc1.weight"]["peak_lr"] == 0.5
    assert groups["patch_embed.proj.weight"]["peak_lr"] == 0.125
    assert groups["blocks.0.norm1.weight"]["weight_decay"] == 0 == groups["positions.table"]["weight_decay"]
    assert groups["blocks.0.attention.qkv.weight"]["weight_decay"] == 0.1
    assert len(by_id) == len(list(model.parameters()))


def test_newton_schulz_brings_singular_values_close_to_one() -> None:
    torch.manual_seed(0)
    for shape in [(3, 40, 64), (2, 64, 40)]:
        values = torch.linalg.svdvals(newton_schulz(torch.randn(shape)))
        assert values.min() > 0.9
        assert values.max() < 1.1


def test_muon_update_in_bf16_matches_fp32() -> None:
    if not probe_capabilities().bf16_works:
        pytest.skip("this processor does not support bf16")
    torch.manual_seed(0)
    updates = [torch.randn(40, 64), torch.randn(96, 32), torch.randn(16, 8, 3, 3)]
    for exact, rounded in zip(orthogonalize(updates), orthogonalize(updates, torch.bfloat16), strict=True):
        assert rounded.dtype == torch.float32
        assert F.cosine_similarity(exact.flatten(), rounded.flatten(), dim=0) > 0.999


def test_muon_orthogonalizes_fused_qkv_as_three_matrices() -> None:
    torch.manual_seed(0)
    fused = nn.Parameter(torch.randn(24, 8))
    separate = [nn.Parameter(chunk.clone()) for chunk in fused.detach().chunk(3)]
    fused.grad = torch.randn(24, 8)
    for p, g in zip(separate, fused.grad.chunk(3), strict=True):
        p.grad = g.clone()
    for params, num_maps in (([fused], 3), (separate, 1)):
        Muon([{"params": params, "lr": 0.1, "weight_decay": 0.0, "num_maps": num_maps}]).step()
    torch.testing.assert_close(fused.detach(), torch.cat([p.detach() for p in separate]))


def test_muon_finds_fused_qkv_by_name() -> None:
    """Not by shape: mlp_dim may be 3 * embed_dim, and num_heads * head_dim may be less than embed_dim."""
    model = pw.build_model(TINY.replace(mlp_dim=48, head_dim=4))
    add_lora(model, 2)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    (muon,) = [o for o in make_optimizers(model, OptimConfig(name="muon")) if isinstance(o, Muon)]
    names = {id(p): n for n, p in model.named_parameters()}
    fused = {names[id(p)] for g in muon.param_groups if g["num_maps"] == 3 for p in g["params"]}
    assert fused == {f"blocks.{i}.attention.qkv.{n}" for i in (0, 1) for n in ("linear.weight", "down", "up")}
    (up,) = orthogonalize([torch.randn(3, 16, 2)], num_maps=3)
    for matrix in up:  # (16, 2), scaled by sqrt(rows / columns)
        assert torch.linalg.svdvals(matrix) == pytest.approx(torch.tensor([8**0.5] * 2), rel=0.12)


def test_ema_averages_weights_and_batch_norm_statistics() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    ema = ModelEma(model, decay=0.75)
    before = {n: t.clone() for n, t in ema.model.state_dict().items()}
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(4)
    ema.update(model, step=1000)
    for name, tensor in ema.model.state_dict().items():
        torch.testing.assert_close(tensor, before[name] + (4 if name.endswith("tracked") else 1))


def test_sam_restore_is_bit_identical() -> None:
    p = nn.Parameter(torch.randn(50))
    p.grad, before = torch.randn(50), p.detach().clone()
    sam = SAM([p], 0.1)
    sam.perturb(float(p.grad.norm()))
    assert float((p.detach() - before).norm()) == pytest.approx(0.1, rel=1e-5)
    sam.restore()
    assert torch.equal(p.detach(), before)


@pytest.mark.parametrize("shape", ["cosine", "linear", "rsqrt", "constant"])
def test_lr_schedule(shape: Any) -> None:
    schedule = ScheduleConfig(shape=shape, warmup_fraction=0.1, cooldown_fraction=0.2)
    values = [lr_factor(schedule, i / 1000) for i in range(1001)]
    assert values[50] == pytest.approx(0.5)
    assert max(values) == pytest.approx(1.0)
    assert values[0] > 0
    assert all(b <= a + 1e-9 for a, b in itertools.pairwise(values[100:]))
    assert values[-1] == pytest.approx(1.0 if shape == "constant" else 0.0, abs=1e-9)
    if shape == "rsqrt":
        assert values[400] == pytest.approx(math.sqrt(0.1 / 0.4))


def test_budget_clock_reserves_time() -> None:
    now = [0.0]
    clock = BudgetClock(100, spent=20, started=0.0, now=lambda: now[0])
    clock.reserve = 10.0
    clock.record_step(2.0)
    assert clock.progress(0) == 0.0
    assert not clock.is_over(5)
    now[0] = 35.0
    assert clock.progress(5) == pytest.approx(35 / 70)
    now[0] = 69.0
    assert clock.is_over(5)
    assert not clock.is_over(0)
    now[0] = 60.0
    assert not clock.is_over(5, 7.0) and clock.is_over(5, 9.0), "time before the next step counts"
    now[0] = 69.0
    assert clock.seconds_left(5, 1.0) == pytest.approx(11.0)


def test_lora_trains_adapters_and_head_and_merges_exactly() -> None:
    trainer = make_trainer(lora_rank=2, optim=OptimConfig(lr=1e-2))
    names = [n for n, p in trainer.model.named_parameters() if p.requires_grad]
    assert all("down" in n or "up" in n or n.startswith("head") for n in names)
    values = losses(trainer, 150)
    assert np.mean(values[-10:]) < 0.8 * values[0]
    merged = pw.build_model(trainer.config.model)
    merged.load_state_dict(merge_lora(trainer.model.state_dict()))
    images = next(trainer.batches).images
    torch.testing.assert_close(merged.eval()(images), trainer.model.eval()(images), atol=1e-5, rtol=1e-5)


def test_lora_keeps_initial_outputs() -> None:
    model = pw.build_model(TINY).eval()
    images = torch.randn(2, 1, 8, 8)
    nn.init.normal_(model.head.weight)  # type: ignore[arg-type]
    before = model(images)
    add_lora(model, 4)
    torch.testing.assert_close(model(images), before)


def test_freeze_keeps_matching_weights() -> None:
    trainer = make_trainer(freeze=("patch_embed", "blocks.0"))
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    losses(trainer, 3)
    changed = {
        n.rsplit(".", 1)[0] for n, p in trainer.model.named_parameters() if not torch.equal(p.detach(), before[n])
    }
    assert "blocks.1.mlp.fc1" in changed
    assert not any(n.startswith(("patch_embed", "blocks.0.")) for n in changed)
    for names in (("stam",), ("blocks.0", "stam")):
        with pytest.raises(ConfigError, match=r"^freeze\b.*\bstam\b.*\bpatch_embed\b") as error:
            make_trainer(freeze=names)
        assert "blocks.0" not in str(error.value)


def test_frozen_batch_norm_keeps_running_statistics() -> None:
    """Also after an evaluation, which switches the mode of all modules; trained batch norms are still updated."""
    model = TINY.replace(stem="conv", stem_layers=(8, 8), patch_size=(1, 1))
    for frozen in (("stem.0", "stem.2"), ()):
        trainer = make_trainer(model=model, freeze=frozen)
        before = {n: b.clone() for n, b in trainer.model.named_buffers() if "running" in n}
        losses(trainer, 2)
        evaluate_split(trainer.eval_model, trainer.val, tta_flip=False, group=trainer.group)
        losses(trainer, 2)
        unchanged = {n for n, b in trainer.model.named_buffers() if "running" in n and torch.equal(b, before[n])}
        frozen_buffers = {n for n in before if n.startswith("stem.2.")}
        assert len(frozen_buffers) == 2 < len(before)
        assert unchanged == (frozen_buffers if frozen else set())


@pytest.mark.parametrize("changes", [{"attention_pattern": "local", "window_size": 1}, {"attention_pattern": "axial"}])
def test_ema_keeps_attention_masks(changes: dict[str, Any]) -> None:
    trainer = make_trainer(model=TINY.replace(**changes), ema=0.5)
    losses(trainer, 3)
    logits = trainer.eval_model(next(trainer.batches).images)
    assert torch.isfinite(logits).all()
    assert trainer.ema is not None
    for name, buffer in trainer.model.named_buffers():
        assert torch.equal(buffer, trainer.ema.model.get_buffer(name)), name


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 2])
def test_wise_ft_interpolates_with_initial_weights_also_after_resume(teacher: Path, lora: int) -> None:
    """The initial weights include the probed head, which a resumed run reads from its checkpoint."""
    data = DatasetSplits(*(relabeled(stripes(count, 16, 3)) for count in (48, 16)))
    wise_ft = config(
        init=str(teacher), head_init="probe", ema=0.5, wise_ft_alpha=0.7, lora_rank=lora, optim=OptimConfig(lr=1e-2)
    )

    def start(fresh: bool, **changes: Any) -> Trainer:
        return Trainer(wise_ft.replace(**changes), data, ProcessGroup(), fresh=fresh)

    interpolated, plain = start(True), start(True, wise_ft_alpha=1.0)
    initial = {n: t.clone() for n, t in interpolated.model.state_dict().items()}
    assert initial["head.weight"].abs().sum() > 0
    for trainer in (interpolated, plain):
        trainer.start_loader()
        losses(trainer, 3)
    saved = (
        interpolated.step,
        dict(interpolated.checkpoint(raw=False).tensors),
        {n: t.clone() for n, t in interpolated.state_tensors().items()},
    )
    resumed = start(False)
    resumed.restore(*saved)
    resumed.start_loader()
    for trainer in (interpolated, resumed, plain):
        losses(trainer, 3)
    for name, tensor in interpolated.eval_model.state_dict().items():
        torch.testing.assert_close(tensor, 0.3 * initial[name] + 0.7 * plain.eval_model.state_dict()[name])
        assert torch.equal(tensor, resumed.eval_model.state_dict()[name]), name


@pytest.mark.slow
@pytest.mark.parametrize(("best_init_weight", "kept"), [(0.5, None), (0.0, "fine-tuned"), (1.0, "initial")])
@pytest.mark.parametrize("earlier_is_best", [False, True])
def test_validation_loss_selects_interpolation(
    teacher: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    best_init_weight: float,
    kept: str | None,
    earlier_is_best: bool,
) -> None:
    """All candidates but one get a higher loss; that one is published, and reported unless it is the interpolation.
    `earlier_is_best`: the first evaluation gets a higher accuracy, so that its step is published without a note.
    """
    wise_ft = config(init=str(teacher), head_init="probe", wise_ft_alpha=0.5, optim=OptimConfig(lr=1e-2), steps=6)
    outputs: list[EvalOutputs] = []
    heads: dict[float, torch.Tensor] = {}
    evaluate, compute_metrics = run_module.evaluate_split, EvalOutputs.metrics

    def record(model: nn.Module, *args: Any, **kwargs: Any) -> EvalOutputs:
        if len(outputs) == 4:  # the test set comes last
            return evaluate(model, *args, **kwargs)
        outputs.append(evaluate(model, *args, **kwargs))
        if len(outputs) > 1:  # the evaluation of the third step comes first
            heads[(0.5, 0.0, 1.0)[len(outputs) - 2]] = model.state_dict()["head.weight"].clone()
        return outputs[-1]

    def fake_metrics(self: EvalOutputs) -> dict[str, float | int]:
        index = next((i for i, each in enumerate(outputs) if each is self), None)
        if index is None:  # the test set
            return compute_metrics(self)
        init_weight = (0.5, 0.5, 0.0, 1.0)[index]
        top1 = float(earlier_is_best) if index == 0 else 0.5
        return {**compute_metrics(self), "top1": top1, "nll": 1.0 + (init_weight != best_init_weight)}

    monkeypatch.setattr(run_module, "evaluate_split", record)
    monkeypatch.setattr(EvalOutputs, "metrics", fake_metrics)
    result = train(wise_ft, tmp_path / "run", splits=relabeled_splits())
    assert result is not None
    assert len(outputs) == 4
    torch.testing.assert_close(heads[0.5], (heads[0.0] + heads[1.0]) / 2)
    assert not torch.equal(heads[0.0], heads[1.0])
    notes = [n for n in result.notes if n.code == "interpolation_not_kept"]
    published = read_checkpoint(tmp_path / "run").tensors["head.weight"]
    if earlier_is_best:
        assert result.best_step == 3
        assert not notes
        assert not any(torch.equal(published, head) for head in heads.values())
    else:
        assert result.best_step == 6
        assert torch.equal(published, heads[best_init_weight])
        assert len(notes) == (kept is not None)
        assert all(kept and kept in n and "wise_ft_alpha 0.5" in n for n in notes)


def read_model_config(path: Path) -> dict[str, Any]:
    """Read the model's config from the config.json or the model.json of a run."""
    document = json.loads(path.read_text())["config"]
    return document["model"] if path.name == "config.json" else document


@pytest.mark.parametrize("image_size", [None, 32])
def test_config_json_has_config_of_trained_model(teacher: Path, tmp_path: Path, image_size: int | None) -> None:
    """The architecture of `init`, not the default ViT-B/16, with the drop_path of the run."""
    run, default = tmp_path / "run", ViTConfig(drop_path=0.1)
    train(config(init=str(teacher), model=default, image_size=image_size), run, splits=relabeled_splits())
    saved = read_model_config(run / "config.json")
    assert saved == read_model_config(run / "model.json")
    assert (saved["embed_dim"], saved["num_classes"], saved["drop_path"]) == (16, 4, 0.1)
    assert saved["image_size"] == [image_size or 16] * 2
    train(config(steps=1), tmp_path / "scratch", splits=make_splits())
    assert read_model_config(tmp_path / "scratch/config.json") == read_model_config(tmp_path / "scratch/model.json")


class KillAt(Callback):
    """Ends a run at a step without saving, as a kill does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_log(self, row: dict[str, Any]) -> None:
        if row["step"] == self.step:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("is_older", [False, True], ids=["resolved", "older version"])
def test_finetuning_run_resumes_with_resolved_or_older_config(teacher: Path, tmp_path: Path, is_older: bool) -> None:
    """Older versions saved the given config; the architecture comes from `init` either way."""
    finetune = config(
        init=str(teacher), model=ViTConfig(drop_path=0.1), head_init="probe", image_size=32, steps=6, ema=0.5
    )
    train(finetune, tmp_path / "uninterrupted", splits=relabeled_splits())
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):  # the first checkpoint is that of step 3
        train(finetune, run, splits=relabeled_splits(), callbacks=(KillAt(step=4),))
    assert read_model_config(run / "config.json") == read_model_config(tmp_path / "uninterrupted/config.json")
    if is_older:
        resolved = json.loads((run / "config.json").read_text())
        given = {**resolved["config"], "model": finetune.model.to_json()}
        (run / "config.json").write_text(json.dumps({**resolved, "config": given}))
    resume(run, splits=relabeled_splits())
    assert (run / "config.json").read_bytes() == (tmp_path / "uninterrupted/config.json").read_bytes()
    assert (run / "model.safetensors").read_bytes() == (tmp_path / "uninterrupted/model.safetensors").read_bytes()


def test_run_killed_before_loading_weights_can_be_resumed(teacher: Path, tmp_path: Path) -> None:
    run = create_run_dir(config(init=str(teacher), model=ViTConfig()), tmp_path / "run")
    assert read_model_config(run / "config.json")["embed_dim"] == 768, "the default, since `init` was not read yet"
    resume(run, splits=relabeled_splits())
    assert read_model_config(run / "config.json") == read_model_config(run / "model.json")


def test_notes_and_steps_are_kept_after_resume(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is probed only before the first step; the report of a resumed run has that note, and all steps."""
    stop = types.SimpleNamespace(signal=None)  # test_resume.py sends real signals

    class Stopper(Callback):
        def on_log(self, row: dict[str, Any]) -> None:
            if row["step"] == 3:
                stop.signal = signal.SIGTERM

    splits = relabeled_splits()
    with monkeypatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(run_module, "StopSignal", lambda: contextlib.nullcontext(stop))
        probed = config(init=str(teacher), head_init="probe", steps=12)
        train(probed, tmp_path / "run", splits=splits, callbacks=(Stopper(),))
    result = resume(tmp_path / "run", splits=splits)
    assert result is not None
    (note,) = [n for n in result.notes if n.code == "head_probed"]
    report = result.report.read_text()
    assert note in report
    assert "4 epochs, 12 steps" in report


def test_assumed_preprocess_is_reported(tmp_path: Path) -> None:
    model = pw.build_model(pw.ViTConfig(image_size=(32, 32), patch_size=(16, 16), embed_dim=192, depth=1, num_heads=3))
    write_checkpoint(tmp_path / "model.safetensors", Checkpoint(model.config, model.state_dict(), None), "timm")
    trainer = Trainer(
        config(init=str(tmp_path / "model.safetensors"), model=ViTConfig()),
        make_splits(channels=3),
        ProcessGroup(),
        fresh=True,
    )
    codes = {note.code for note in trainer.notes}
    assert "preprocess_assumed" in codes and "head_replaced" not in codes, "replacing the head is intended"


def test_wise_ft_alpha_needs_init() -> None:
    with pytest.raises(ConfigError, match=r"wise_ft_alpha 0\.7 .*\binit\b"):
        config(wise_ft_alpha=0.7)


def test_non_finite_validation_logits_stop_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def update_with_nan(self: ModelEma, model: nn.Module, step: int) -> None:
        next(self.model.parameters()).fill_(math.nan)

    monkeypatch.setattr(ModelEma, "update", update_with_nan)
    with pytest.raises(TrainingError, match="validation") as error:
        train(config(ema=0.5), tmp_path / "run", splits=make_splits())
    assert error.value.code == "not_finite"


def test_freeze_first_third() -> None:
    first_third = Config(init="weights", freeze=("first-third",))
    model = pw.build_model(TINY.replace(depth=3))
    freeze(model, first_third)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert {n[:8] if n.startswith("blocks") else n.split(".")[0] for n in trained} == {
        "blocks.1", "blocks.2", "norm", "head"
    }  # fmt: skip
    resnet = pw.build_model(ResNetConfig(image_size=(8, 8), in_channels=1, layers=(1,), kind="cifar"))
    freeze(resnet, first_third)
    assert all(p.requires_grad for p in resnet.parameters()), "a ResNet has no blocks"
    with pytest.raises(ConfigError, match=r"first-third.*\binit\b"):
        load_recipe("finetune").replace(init=None, wise_ft_alpha=1.0)


def test_gradient_checkpointing_keeps_losses() -> None:
    assert losses(make_trainer(model=TINY.replace(grad_checkpointing=True)), 3) == pytest.approx(
        losses(make_trainer(), 3), abs=1e-6
    )


def test_finetuning_replaces_head_unless_labels_match(teacher: Path, tmp_path: Path) -> None:
    data = DatasetSplits(stripes(48, 16, 3, classes=2), stripes(16, 16, 3, classes=2))
    zero_init = Trainer(config(init=str(teacher)), data, ProcessGroup(), fresh=True)
    assert zero_init.model.head.weight.shape == (2, 16)
    assert not zero_init.model.head.weight.any()
    probed = Trainer(config(init=str(teacher), head_init="probe"), data, ProcessGroup(), fresh=True)
    assert probed.model.head.weight.any()
    assert probed.notes[-1].code == "head_probed"
    same_labels = Trainer(
        config(init=str(teacher)), DatasetSplits(stripes(16, 16, 3), stripes(16, 16, 3)), ProcessGroup(), fresh=True
    )
    torch.testing.assert_close(dict(same_labels.model.state_dict()), dict(read_checkpoint(teacher).tensors))
    resized = Trainer(config(init=str(teacher), image_size=32), data, ProcessGroup(), fresh=True)
    assert resized.model.config.image_size == (32, 32) == resized.preprocess.size


def test_probed_head_has_lower_initial_loss_than_zero_head(teacher: Path, tmp_path: Path) -> None:
    data = DatasetSplits(stripes(48, 16, 3, classes=2), stripes(16, 16, 3, classes=2))
    nll = {}
    for head_init in ("zero", "probe"):
        run = config(init=str(teacher), head_init=head_init, steps=1, optim=OptimConfig(lr=1e-6))
        result = train(run, tmp_path / head_init, splits=data)
        assert result is not None
        nll[head_init] = result.metrics["val"]["nll"]
    assert nll["probe"] < 0.6 * nll["zero"]


@pytest.mark.slow
def test_probed_head_is_regularized_towards_pretrained_head(tmp_path: Path) -> None:
    """The same classes with other names, three images per class, one of them mislabeled."""
    train(config(steps=120, optim=OptimConfig(lr=1e-2)), tmp_path / "base", splits=make_splits())
    few, many, labels = stripes(12), stripes(64), ["p", "q", "r", "s"]
    noisy_targets = np.where(np.arange(12) < 4, (few.targets + 1) % 4, few.targets)
    splits = DatasetSplits(
        ArraySource(few.images, labels, noisy_targets), ArraySource(many.images, labels, many.targets)
    )
    run_config = config(init=str(tmp_path / "base"), head_init="probe", batch_size=4)
    trainer = Trainer(run_config, splits, ProcessGroup(), fresh=True)
    assert [note.code for note in trainer.notes if "pretrained head" in note] == ["head_probed"], trainer.notes
    trainer.model.eval()
    batch = next(iter(trainer.val.eval_batches(64)))
    assert (trainer.model(batch.images).argmax(1) == batch.targets).float().mean() > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("two_heads", [True, False])
def test_distillation_reduces_loss(kind: Any, two_heads: bool, teacher: Path) -> None:
    """With weight 1 the loss depends on the teacher only, not on the labels."""
    data = DatasetSplits(stripes(32, 16, 3), stripes(8, 16, 3))
    student = TINY.replace(in_channels=3, distillation=two_heads)
    distill = DistillConfig(teacher=str(teacher), kind=kind, weight=1.0)
    run = config(model=student, distill=distill, optim=OptimConfig(lr=3e-3), steps=60)
    trainer = Trainer(run, data, ProcessGroup(), fresh=True)
    assert trainer.teacher is not None
    trainer.start_loader()
    values = losses(trainer, 60)
    assert np.mean(values[-5:]) < np.mean(values[:5])


def test_teacher_gets_full_size_images_during_progressive_resizing(teacher: Path) -> None:
    data = DatasetSplits(stripes(32, 16, 3), stripes(8, 16, 3))
    model = TINY.replace(in_channels=3, image_size=16)
    run = config(
        model=model, distill=DistillConfig(teacher=str(teacher)), progressive_resize=ProgressiveResizeConfig(0.5, 1.0)
    )
    trainer = Trainer(run, data, ProcessGroup(), fresh=True)
    trainer.start_loader()
    trainer.is_first_phase = True
    batch = next(iter(trainer.batches))
    inputs = trainer.prepare_inputs(batch)
    assert trainer.teacher is not None
    assert inputs["images"].shape[-1] == 8
    torch.testing.assert_close(inputs["teacher_logits"], trainer.teacher(batch.images))


@pytest.mark.slow
def test_both_heads_are_trained_without_teacher(tmp_path: Path) -> None:
    model = TINY.replace(distillation=True)
    result = train(config(model=model, steps=120, optim=OptimConfig(lr=1e-2)), tmp_path / "run", splits=make_splits())
    assert result is not None
    assert result.metrics["test"]["top1"] > 0.9
    tensors = read_checkpoint(tmp_path / "run").tensors
    assert tensors["head_distilled.weight"].abs().max() > 0.1 * tensors["head.weight"].abs().max() > 0


def test_resnet_teacher_matches_classes_by_label(tmp_path: Path) -> None:
    model = ResNetConfig(image_size=32, layers=(1,), num_classes=4)
    preprocess = pw.Preprocess((32, 32), mean=(0.4,) * 3, std=(0.2,) * 3)
    write_checkpoint(
        tmp_path / "r", Checkpoint(model, pw.build_model(model).state_dict(), preprocess, stripes().labels[::-1])
    )
    run = config(model=TINY.replace(in_channels=3), distill=DistillConfig(teacher=str(tmp_path / "r"), kind="soft"))
    trainer = Trainer(run, DatasetSplits(stripes(32, 8, 3), stripes(8, 8, 3)), ProcessGroup(), fresh=True)
    trainer.start_loader()
    assert all(math.isfinite(loss) for loss in losses(trainer, 2))
    assert trainer.teacher is not None
    assert trainer.teacher.class_order is not None
    assert trainer.teacher.class_order.tolist() == [3, 2, 1, 0]


def test_teacher_with_other_num_classes_is_rejected(teacher: Path) -> None:
    run = config(model=TINY.replace(in_channels=3), distill=DistillConfig(teacher=str(teacher)))
    with pytest.raises(ConfigError, match=re.escape(f"distill.teacher: {teacher} ") + r"\D*\b4\b\D*\b2\b"):
        Trainer(
            run, DatasetSplits(stripes(8, 16, 3, classes=2), stripes(8, 16, 3, classes=2)), ProcessGroup(), fresh=True
        )


def test_teacher_classes_match_by_synonym_or_wordnet_id() -> None:
    """The dataset has WordNet ids; the teacher has labels such as "tench, Tinca tinca", or none."""
    ids, names = zip(*imagenet_classes(), strict=True)
    for teacher_labels in (names, None):
        order = match_teacher_classes("t", teacher_labels, 1000, ids[::-1])
        assert order is not None
        assert order.tolist() == list(range(999, -1, -1))
    with pytest.raises(ConfigError, match=r"^distill\.teacher: t .*\bbird\b"):
        match_teacher_classes("t", ("cat", "dog"), 2, ("cat", "bird"))
    with pytest.raises(ConfigError, match=r"^distill\.teacher: two .*\bt\.$"):
        match_teacher_classes("t", ("cat, kitty", "dog"), 2, ("cat", "kitty"))


@pytest.mark.slow
def test_multi_label_training(tmp_path: Path) -> None:
    source = stripes(64)
    targets = np.eye(4, dtype=np.float32)[source.targets]
    targets[:, 0] = 1  # every image has class 0, and at most one other
    multi_label = from_arrays(source.images, targets, labels=source.labels)
    result = train(
        config(steps=300, optim=OptimConfig(lr=1e-2)), tmp_path / "run", splits=DatasetSplits(multi_label, multi_label)
    )
    assert result is not None
    assert result.metrics["val"]["map"] > 0.95
    assert result.metrics["val"]["f1"] > 0.9
    scores = pw.Classifier.load(tmp_path / "run")(multi_label.read(1, mode="L")).scores
    assert sum(s.probability > 0.5 for s in scores) == 2  # independent probabilities, whose sum may exceed 1


def test_label_smoothing_matches_torch() -> None:
    objective = make_objective(config(label_smoothing=0.1), np.arange(4), 4)
    logits, targets = torch.randn(8, 4), torch.arange(8) % 4
    expected = nn.functional.cross_entropy(logits, targets, label_smoothing=0.1)
    torch.testing.assert_close(objective.label_loss(logits, targets), expected)


def test_normalization_comes_from_data_or_pretrained_weights(teacher: Path) -> None:
    assert make_trainer().preprocess.mean[0] == pytest.approx(stripes().images.mean() / 255, abs=0.01)
    trainer = Trainer(
        config(init=str(teacher)), DatasetSplits(stripes(8, 16, 3), stripes(8, 16, 3)), ProcessGroup(), fresh=True
    )
    assert trainer.preprocess.mean == (0.5, 0.5, 0.5)


def test_unreadable_images_are_skipped_and_reported(tmp_path: Path) -> None:
    from PIL import Image

    for split, count in (("train", 12), ("val", 6)):
        for i in range(count):
            path = tmp_path / f"data/{split}/{'ab'[i % 2]}/{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), 255 * (i % 2)).save(path)
    (tmp_path / "data/train/a/0.png").write_bytes(b"not an image")
    (tmp_path / "data/val/b/1.png").write_bytes(b"not an image")
    run = config(data=DataConfig(source=str(tmp_path / "data"), num_workers=2), batch_size=4, steps=6)
    result = train(run, tmp_path / "run")
    assert result is not None
    assert result.metrics["val"]["n"] == 5
    notes = [n for n in result.notes if n.code == "images_unreadable"]
    assert result.num_unreadable == len(notes) == 2
    assert "train" in notes[0]
    assert "0.png" in notes[0]
    for path in (tmp_path / "data").rglob("*.png"):
        path.write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"'train'.*\b12\b.*\.png") as error:
        train(run, tmp_path / "again")
    assert error.value.code == "invalid_data"


def test_apply_overrides() -> None:
    base = load_recipe("finetune")
    changed = apply_overrides(
        base, {"optim.lr": 3e-5, "budget": "1h30m", "augment": "medium", "model": "S/16", "loggers": "wandb"}
    )
    assert (changed.optim.lr, changed.budget, changed.augment.randaug_magnitude) == (3e-5, 5400.0, 15)
    assert isinstance(changed.model, ViTConfig)
    assert changed.model.embed_dim == 384
    assert changed.loggers == ("wandb",)
    for path, named in (("optim.lrr", r"\blrr\b.*\blr\?"), ("optim.lr.x", r"\bx\b"), ("nothing", r"\bnothing\b")):
        with pytest.raises(ConfigError, match=named) as error:
            apply_overrides(base, {path: 1})
        assert error.value.code == "unknown_field"
    assert base.freeze == apply_overrides(base, {"epochs": 1}).freeze == ("first-third",)
    for change in ({"model": "S/16"}, {"init": "none"}, {"lora_rank": 8}):
        assert apply_overrides(base, change).freeze == (), "new weights must be trained"
        assert apply_overrides(base, change).wise_ft_alpha == (0.5 if "lora_rank" in change else 1.0)
    assert apply_overrides(base, {"init": "none", "freeze": "stem"}).freeze == ("stem",)
    for order in (("model.embed_dim", "model.num_heads"), ("model.num_heads", "model.embed_dim")):
        wide = apply_overrides(
            base, {"model": "Ti/16", **dict.fromkeys(order, 0), "model.embed_dim": 250, "model.num_heads": 5}
        )
        assert isinstance(wide.model, ViTConfig)
        assert (wide.model.embed_dim, wide.model.num_heads) == (250, 5)
    assert apply_overrides(base, {"freeze": "none"}).freeze == apply_overrides(base, {"freeze": ["none"]}).freeze == ()
    scratch = load_recipe("cifar10_scratch")
    assert apply_overrides(scratch, {"steps": 5}).budget is None, "the override replaces the recipe's length"
    assert apply_overrides(scratch, {"epochs": 5}).budget is None
    assert apply_overrides(scratch, {"data": "photos"}).data.source == "photos"
    assert changed.init is None
    assert apply_overrides(base, {"init": "none"}).init is None
    assert apply_overrides(base, {"model.drop_path": 0.1}).init == base.init
    with pytest.raises(ConfigError, match=r"^--model\.depth .*hf:timm.*--image-size") as error:
        apply_overrides(base, {"model.depth": 6, "model.drop_path": 0.1})
    assert error.value.code == "override_ignored"
    assert "drop_path" not in str(error.value)
    assert apply_overrides(base, {"model": "S/16", "model.depth": 6}).model.depth == 6
    for conflict, named in (
        ({"steps": 5, "budget": "1m"}, "budget.*steps"),
        ({"model": "S/16", "init": "hf:a/b"}, "model.*init.*hf:a/b"),
    ):
        with pytest.raises(ConfigError, match=named):
            apply_overrides(base, conflict)
    assert parse_duration("90") == 90
    assert parse_duration("1.5h") == 5400
    for wrong in ("", "10x", "m10", "1h-3m"):
        with pytest.raises(ConfigError, match=f"^{wrong!r}") as error:
            parse_duration(wrong)
        assert error.value.code == "invalid_duration"


def test_loggers_write_tensorboard_and_reject_missing_package(tmp_path: Path) -> None:
    from patchword.training.loggers import make_loggers

    run = config(loggers=("tensorboard",))
    train(run, tmp_path / "run", splits=make_splits(), callbacks=make_loggers(run))
    assert list((tmp_path / "run/tensorboard").glob("events.*"))
    with pytest.raises(ConfigError, match=r"\.\[log\]"):
        make_loggers(config(loggers=("mlflow", "wandb")))


@pytest.mark.slow
def test_cli_trains_and_refuses_to_resume_finished_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "patchword", "train", "quickstart", "--steps", "3", "--out", "run", "--json"]
    command += ["--model.depth", "1", "--model.embed-dim", "24", "--optim.betas", "0.9", "0.95"]
    command += ["--freeze", "stem", "norm"]
    trained = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert trained.returncode == 0, trained.stderr
    summary = json.loads(trained.stdout)
    assert summary["steps"] == 3
    assert summary["test"]["n"] == 359
    assert "top1" in trained.stderr
    saved = json.loads((tmp_path / "run/config.json").read_text())["config"]
    assert (saved["model"]["depth"], saved["optim"]["betas"], saved["freeze"]) == (1, [0.9, 0.95], ["stem", "norm"])
    resumed = subprocess.run(
        [sys.executable, "-m", "patchword", "resume", "run"], cwd=tmp_path, capture_output=True, text=True
    )
    assert resumed.returncode == 2
    assert "run/report.html" in resumed.stderr
    assert "Traceback" not in resumed.stderr


def test_progressive_resizing(tmp_path: Path) -> None:
    """The first phase uses small images, the second one and evaluation use full-size images."""
    sizes: list[int] = []
    trainer = make_trainer(progressive_resize=ProgressiveResizeConfig(0.6, 0.5))
    trainer.model.register_forward_pre_hook(lambda module, inputs: sizes.append(inputs[0].shape[-1]))
    for step in range(6):
        trainer.train_step(step / 6)
    assert sizes == [4, 4, 4, 8, 8, 8], "0.6 * 8 pixels, rounded to patches of 2"
    result = train(
        config(steps=6, progressive_resize=ProgressiveResizeConfig(0.1)), tmp_path / "run", splits=make_splits()
    )
    assert result is not None
    assert result.metrics["test"]["n"] == 20
    local = TINY.replace(pos_embed="relative", attention_pattern="local", window_size=3)
    for model in (local, TINY.replace(pos_embed="rotary")):
        make_trainer(progressive_resize=ProgressiveResizeConfig(0.5), model=model).train_step(0.0)


def test_cpu_data_parallel_gradients_have_strides_of_weights() -> None:
    """LoRA's gradients are computed transposed, but fused AdamW ignores strides."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        trainer = make_trainer(batch_size=32, lora_rank=2)
        assert trainer.cpu_parallel is not None
        losses(trainer, 2)
        trainer.compute_gradients([next(trainer.batches)])
    finally:
        torch.set_num_threads(num_threads)
    assert all(p.grad is not None and p.grad.stride() == p.stride() for p in trainer.parameters)


@pytest.mark.parametrize("stem", ["linear", "conv"])
def test_cpu_data_parallel_matches_whole_batch(stem: Any) -> None:
    """Two chunks give the gradients of the whole batch (except with batch norm), and are deterministic."""
    model = TINY.replace(stem=stem, stem_layers=(8,) if stem == "conv" else (), patch_size=(2, 2))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        trainers = [make_trainer(model=model, batch_size=64, steps=3) for _ in range(3)]
        assert all(t.cpu_parallel is not None and len(t.cpu_parallel.replicas) == 2 for t in trainers)
        trainers[2].cpu_parallel = None
        first, repeated, whole_batch = (losses(t, 3) for t in trainers)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(num_threads)
    assert first == repeated
    states = [t.model.state_dict() for t in trainers]
    assert all(torch.equal(states[0][n], states[1][n]) for n in states[0])
    if stem == "linear":
        torch.testing.assert_close(torch.tensor(first), torch.tensor(whole_batch))
        for name, value in states[0].items():
            torch.testing.assert_close(value, states[2][name], rtol=1e-3, atol=1e-5)
    else:
        means = [s["stem.2.running_mean"] for s in states]
        torch.testing.assert_close(means[0], means[2], rtol=0.1, atol=0.05)
    for changes in ({"dropout": 0.1}, {"attention_dropout": 0.1}, {"drop_path": 0.1}):
        assert make_trainer(model=TINY.replace(**changes)).cpu_parallel is None, "threads would share one generator"
