"""Training: every recipe makes a step, every option does what it says, and a run leaves what it promises."""

import contextlib
import itertools
import json
import math
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
from helpers.tiny_trainer import TINY, config, make_splits, stripes, trainer
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
from patchword.recipes import RECIPES, load_recipe
from patchword.training import resume, train
from patchword.training import run as run_module
from patchword.training.budget_clock import BudgetClock
from patchword.training.callbacks import Callback
from patchword.training.distributed import ProcessGroup
from patchword.training.ema import ModelEma
from patchword.training.evaluator import EvalOutputs, evaluate_split
from patchword.training.init_model import freeze
from patchword.training.lora import add_lora, merge_lora
from patchword.training.loss import class_weights, make_objective, match_teacher_classes
from patchword.training.optimizers import SAM, Muon, make_optimizers, newton_schulz, orthogonalize
from patchword.training.run_dir import create_run_dir
from patchword.training.schedule import lr_factor
from patchword.training.trainer import Trainer


def renamed(source: ArraySource) -> ArraySource:
    """With other classes than weights that know stripes have a head for."""
    return from_arrays(source.images, source.targets, labels=tuple("abcd"))


def losses(made: Trainer, steps: int) -> list[float]:
    return [float(made.train_step(0.5)["loss"] or 0) for _ in range(steps)]


def shrunk(recipe: Config, teacher: Path) -> Config:
    """The same recipe for a model and data of a size for tests."""
    if isinstance(recipe.model, ResNetConfig):
        model: Any = recipe.model.replace(image_size=32, layers=(1, 1))
    else:
        wide = {"embed_dim": 32, "depth": 2, "num_heads": 2, "mlp_dim": 32, "in_channels": 3}
        small = {"image_size": 16, "patch_size": 4, "stem": "linear", "stem_layers": ()}
        model = recipe.model.replace(**wide, **small)
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
    """A small model that knows the stripes' classes."""
    model = TINY.replace(in_channels=3, image_size=16, num_classes=4)
    preprocess = pw.Preprocess((16, 16), mean=(0.5,) * 3, std=(0.5,) * 3)
    torch.manual_seed(0)
    tensors = pw.build_model(model).state_dict()
    tensors["head.weight"] = torch.randn(4, 16)
    labels = tuple(f"stripe {i}" for i in range(4))
    write_checkpoint(tmp_path / "teacher", Checkpoint(model, tensors, preprocess, labels))
    return tmp_path / "teacher"


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_makes_a_step(name: str, teacher: Path, tmp_path: Path) -> None:
    data = DatasetSplits(stripes(16, 16, 3), stripes(8, 16, 3))
    outcome = train(shrunk(load_recipe(name), teacher), tmp_path / "run", splits=data)
    assert outcome is not None
    assert outcome.steps == 1
    assert pw.Classifier.load(tmp_path / "run").labels == data.train.labels


def test_recipes_are_one_screen_and_say_how_to_run_them() -> None:
    folder = Path(sys.modules["patchword.recipes"].__file__ or "").parent
    for name in RECIPES:
        text = (folder / f"{name}.py").read_text()
        assert len(text.splitlines()) <= 45 and "Command: " in text, name


def test_a_users_own_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from patchword.config import Config\nconfig = Config(name='mine')\n")
    assert load_recipe(str(tmp_path / "mine.py")).name == "mine"
    (tmp_path / "bad.py").write_text("config = 1/0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_recipe(str(tmp_path / "bad.py"))
    with pytest.raises(ConfigError, match="Did you mean finetune"):
        load_recipe("finetun")


def test_a_run_leaves_what_it_promises(tmp_path: Path) -> None:
    outcome = train(config(steps=80, optim=OptimConfig(lr=1e-2)), tmp_path / "run", splits=make_splits())
    assert outcome is not None
    assert outcome.metrics["test"]["top1"] == 1.0
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
    found = read_checkpoint(tmp_path / "run")
    assert found.provenance["metrics"]["test"]["top1"] == 1.0
    assert found.labels == stripes().labels


def test_runs_are_never_overwritten(tmp_path: Path) -> None:
    train(config(steps=1), tmp_path / "run", splits=make_splits())
    with pytest.raises(ConfigError, match="never overwritten.*patchword resume"):
        train(config(steps=1), tmp_path / "run", splits=make_splits())


def test_a_run_that_cannot_start_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model at"):
        train(config(init=str(tmp_path / "weights"), steps=1), tmp_path / "run", splits=make_splits())
    assert list(tmp_path.iterdir()) == []


def test_evaluations_are_few_where_epochs_are_short(tmp_path: Path) -> None:
    few = DatasetSplits(make_splits().train.subset(np.arange(16)), make_splits().train.subset(np.arange(16, 32)))
    train(config(steps=450, batch_size=16, eval_every=1.0), tmp_path / "run", splits=few)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert 200 <= sum(row["kind"] == "val" for row in rows) <= 226


def test_the_same_seed_gives_the_same_run_and_another_another() -> None:
    strong = AugmentConfig(crop="shift", flip=0.5, mixup=0.4, random_erasing=0.3)

    def run(**changes: Any) -> list[float]:
        return losses(trainer(model=TINY.replace(dropout=0.1), augment=strong, **changes), 5)

    assert run() == run() == run(data=DataConfig(num_workers=2)) == run(data=DataConfig(num_workers=3))
    assert run() != run(seed=1)


def test_accumulation_makes_the_same_steps() -> None:
    whole, split = losses(trainer(), 6), losses(trainer(grad_accum_steps=4), 6)
    assert split == pytest.approx(whole, abs=1e-5)


def test_pictures_come_in_the_same_order_for_every_batch_size() -> None:
    def seen(size: int) -> list[int]:
        made = trainer(batch_size=size)
        return [int(i) for _ in range(48 // size * 3) for i in next(made.batches).indices]

    assert seen(4) == seen(16) == seen(48)
    assert sorted(seen(16)[:48]) == list(range(48))
    assert seen(16)[:48] != seen(16)[48:96]


def test_balanced_sampling() -> None:
    source = stripes()
    rare = source.subset(np.flatnonzero((source.targets > 0) | (np.arange(48) < 4)))
    made = Trainer(
        config(data=DataConfig(num_workers=0, balanced_sampling=True)),
        DatasetSplits(rare, rare),
        ProcessGroup(),
        fresh=True,
    )
    made.start_loader()
    seen = np.concatenate([next(made.batches).targets.numpy() for _ in range(30)])
    assert np.bincount(seen).min() > 0.2 * len(seen)


def test_class_weights() -> None:
    weights = class_weights(np.array([0, 0, 0, 1]), 3)
    assert weights.tolist() == pytest.approx([2 / 3, 2.0, 0.0])


def test_class_weights_do_not_depend_on_how_a_batch_is_divided() -> None:
    source = stripes()
    rare = source.subset(np.flatnonzero((source.targets > 0) | (np.arange(48) < 4)))
    found = []
    for accumulate in (1, 4):
        run = config(class_weights=True, grad_accum_steps=accumulate, num_threads=1)
        made = Trainer(run, DatasetSplits(rare, rare), ProcessGroup(), fresh=True)
        made.start_loader()
        found.append(losses(made, 6))
    assert found[1] == pytest.approx(found[0], abs=1e-5)


@pytest.mark.parametrize("optim", [
    OptimConfig(name="sgd", lr=0.03), OptimConfig(name="muon", lr=1e-2), OptimConfig(lr=1e-2, sam_rho=0.05),
    OptimConfig(lr=1e-2, layer_decay=0.7, head_lr_scale=2.0),
], ids=lambda o: f"{o.name}-{o.sam_rho}-{o.layer_decay}")  # fmt: skip
def test_every_optimiser_learns(optim: OptimConfig) -> None:
    found = losses(trainer(optim=optim), 180)
    assert np.mean(found[-5:]) < 0.5 * found[0]


def test_groups_have_their_rates_and_decay() -> None:
    model = pw.build_model(TINY)
    groups = make_optimizers(model, OptimConfig(lr=1.0, layer_decay=0.5, head_lr_scale=3.0, weight_decay=0.1))[
        0
    ].param_groups
    place = {id(p): g for g in groups for p in g["params"]}
    named = {n: place[id(p)] for n, p in model.named_parameters()}
    assert named["head.weight"]["peak_lr"] == 3.0
    assert named["norm.weight"]["peak_lr"] == 1.0
    assert named["blocks.1.mlp.fc1.weight"]["peak_lr"] == 0.5
    assert named["patch_embed.proj.weight"]["peak_lr"] == 0.125
    assert named["blocks.0.norm1.weight"]["weight_decay"] == 0 == named["positions.table"]["weight_decay"]
    assert named["blocks.0.attention.qkv.weight"]["weight_decay"] == 0.1
    assert len(place) == len(list(model.parameters()))


def test_newton_schulz_makes_singular_values_one() -> None:
    torch.manual_seed(0)
    for shape in [(3, 40, 64), (2, 64, 40)]:
        values = torch.linalg.svdvals(newton_schulz(torch.randn(shape)))
        assert values.min() > 0.9
        assert values.max() < 1.1


def test_muon_in_bf16_goes_the_same_way() -> None:
    if not probe_capabilities().bf16_works:
        pytest.skip("this processor cannot compute in bf16")
    torch.manual_seed(0)
    updates = [torch.randn(40, 64), torch.randn(96, 32), torch.randn(16, 8, 3, 3)]
    for exact, rounded in zip(orthogonalize(updates), orthogonalize(updates, torch.bfloat16), strict=True):
        assert rounded.dtype == torch.float32
        assert F.cosine_similarity(exact.flatten(), rounded.flatten(), dim=0) > 0.999


def test_muon_takes_a_fused_qkv_for_three() -> None:
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(24, 8))
    three = [nn.Parameter(part.clone()) for part in whole.detach().chunk(3)]
    whole.grad = torch.randn(24, 8)
    for p, g in zip(three, whole.grad.chunk(3), strict=True):
        p.grad = g.clone()
    for params, maps in (([whole], 3), (three, 1)):
        Muon([{"params": params, "lr": 0.1, "weight_decay": 0.0, "num_maps": maps}]).step()
    torch.testing.assert_close(whole.detach(), torch.cat([p.detach() for p in three]))


def test_muon_knows_queries_keys_and_values_by_name() -> None:
    """Not by shape: an MLP may be three times as wide as the model, and heads may be narrower than its share."""
    model = pw.build_model(TINY.replace(mlp_dim=48, head_dim=4))
    add_lora(model, 2)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    (muon,) = [o for o in make_optimizers(model, OptimConfig(name="muon")) if isinstance(o, Muon)]
    names = {id(p): n for n, p in model.named_parameters()}
    threes = {names[id(p)] for g in muon.param_groups if g["num_maps"] == 3 for p in g["params"]}
    assert threes == {f"blocks.{i}.attention.qkv.{n}" for i in (0, 1) for n in ("linear.weight", "down", "up")}
    (up,) = orthogonalize([torch.randn(3, 16, 2)], num_maps=3)
    for each in up:  # (16, 2), scaled as any map that is eight times as tall as wide
        assert torch.linalg.svdvals(each) == pytest.approx(torch.tensor([8**0.5] * 2), rel=0.12)


def test_the_average_is_of_weights_and_statistics() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    average = ModelEma(model, decay=0.75)
    before = {n: t.clone() for n, t in average.model.state_dict().items()}
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(4)
    average.update(model, step=1000)
    for name, tensor in average.model.state_dict().items():
        torch.testing.assert_close(tensor, before[name] + (4 if name.endswith("tracked") else 1))


def test_sam_comes_back_to_the_bit() -> None:
    p = nn.Parameter(torch.randn(50))
    p.grad, before = torch.randn(50), p.detach().clone()
    sharpness = SAM([p], 0.1)
    sharpness.perturb(float(p.grad.norm()))
    assert float((p.detach() - before).norm()) == pytest.approx(0.1, rel=1e-5)
    sharpness.restore()
    assert torch.equal(p.detach(), before)


@pytest.mark.parametrize("shape", ["cosine", "linear", "rsqrt", "constant"])
def test_schedules(shape: Any) -> None:
    schedule = ScheduleConfig(shape=shape, warmup_fraction=0.1, cooldown_fraction=0.2)
    values = [lr_factor(schedule, i / 1000) for i in range(1001)]
    assert values[50] == pytest.approx(0.5)
    assert max(values) == pytest.approx(1.0)
    assert values[0] > 0
    assert all(b <= a + 1e-9 for a, b in itertools.pairwise(values[100:]))
    assert values[-1] == pytest.approx(1.0 if shape == "constant" else 0.0, abs=1e-9)
    if shape == "rsqrt":
        assert values[400] == pytest.approx(math.sqrt(0.1 / 0.4))


def test_a_budget_keeps_time_back() -> None:
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
    assert not clock.is_over(5, 7.0) and clock.is_over(5, 9.0), "what is done before the step counts"
    now[0] = 69.0
    assert clock.seconds_left(5, 1.0) == pytest.approx(11.0)


def test_lora_trains_little_and_merges_exactly() -> None:
    made = trainer(lora_rank=2, optim=OptimConfig(lr=1e-2))
    names = [n for n, p in made.model.named_parameters() if p.requires_grad]
    assert all("down" in n or "up" in n or n.startswith("head") for n in names)
    found = losses(made, 150)
    assert np.mean(found[-10:]) < 0.8 * found[0]
    merged = pw.build_model(made.config.model)
    merged.load_state_dict(merge_lora(made.model))
    images = next(made.batches).images
    torch.testing.assert_close(merged.eval()(images), made.model.eval()(images), atol=1e-5, rtol=1e-5)


def test_lora_starts_from_the_model_as_it_was() -> None:
    model = pw.build_model(TINY).eval()
    images = torch.randn(2, 1, 8, 8)
    nn.init.normal_(model.head.weight)  # type: ignore[arg-type]
    before = model(images)
    add_lora(model, 4)
    torch.testing.assert_close(model(images), before)


def test_freezing() -> None:
    made = trainer(freeze=("patch_embed", "blocks.0"))
    before = {n: p.detach().clone() for n, p in made.model.named_parameters()}
    losses(made, 3)
    changed = {n.rsplit(".", 1)[0] for n, p in made.model.named_parameters() if not torch.equal(p.detach(), before[n])}
    assert "blocks.1.mlp.fc1" in changed
    assert not any(n.startswith(("patch_embed", "blocks.0.")) for n in changed)
    for names in (("stam",), ("blocks.0", "stam")):
        with pytest.raises(ConfigError, match="no weight begins with stam"):
            trainer(freeze=names)


def test_frozen_batch_norms_keep_their_statistics() -> None:
    """Also after an evaluation, which puts the whole model into another mode; those that learn go on."""
    model = TINY.replace(stem="conv", stem_layers=(8, 8), patch_size=(1, 1))
    for frozen in (("stem.0", "stem.2"), ()):
        made = trainer(model=model, freeze=frozen)
        before = {n: b.clone() for n, b in made.model.named_buffers() if "running" in n}
        losses(made, 2)
        evaluate_split(made.eval_model, made.val, tta_flip=False, group=made.group)
        losses(made, 2)
        still = {n for n, b in made.model.named_buffers() if "running" in n and torch.equal(b, before[n])}
        first = {n for n in before if n.startswith("stem.2.")}
        assert len(first) == 2 < len(before)
        assert still == (first if frozen else set())


@pytest.mark.parametrize("changes", [{"attention_pattern": "local", "window_size": 1}, {"attention_pattern": "axial"}])
def test_averages_leave_masks_alone(changes: dict[str, Any]) -> None:
    made = trainer(model=TINY.replace(**changes), ema=0.5)
    losses(made, 3)
    said = made.eval_model(next(made.batches).images)
    assert torch.isfinite(said).all()
    assert made.ema is not None
    for name, buffer in made.model.named_buffers():
        assert torch.equal(buffer, made.ema.model.get_buffer(name)), name


@pytest.mark.parametrize("lora", [0, 2])
def test_a_share_of_the_start_stays_in_what_is_evaluated(teacher: Path, lora: int) -> None:
    """The start is the probed head, too, which is in no file but the run's: a resumed run has it from its state."""
    data = DatasetSplits(*(renamed(stripes(count, 16, 3)) for count in (48, 16)))
    mixed = config(
        init=str(teacher), head_init="probe", ema=0.5, wise_ft_alpha=0.7, lora_rank=lora, optim=OptimConfig(lr=1e-2)
    )

    def begun(fresh: bool, **changes: Any) -> Trainer:
        return Trainer(mixed.replace(**changes), data, ProcessGroup(), fresh=fresh)

    whole, plain = begun(True), begun(True, wise_ft_alpha=1.0)
    start = {n: t.clone() for n, t in whole.model.state_dict().items()}
    assert start["head.weight"].abs().sum() > 0
    for made in (whole, plain):
        made.start_loader()
        losses(made, 3)
    saved = (
        whole.step,
        dict(whole.checkpoint(raw=False).tensors),
        {n: t.clone() for n, t in whole.state_tensors().items()},
    )
    again = begun(False)
    again.restore(*saved)
    again.start_loader()
    for made in (whole, again, plain):
        losses(made, 3)
    for name, mixture in whole.eval_model.state_dict().items():
        torch.testing.assert_close(mixture, 0.3 * start[name] + 0.7 * plain.eval_model.state_dict()[name])
        assert torch.equal(mixture, again.eval_model.state_dict()[name]), name


@pytest.mark.parametrize(
    ("best", "told"), [(0.5, None), (0.0, "The fine-tuned weights are kept"), (1.0, "The initial weights are kept")]
)
@pytest.mark.parametrize("earlier", [False, True])
def test_validation_decides_how_much_of_the_start_stays(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: float, told: str | None, earlier: bool
) -> None:
    """All but the share that is to win are given a worse loss; what wins is what is published, and told of. `earlier`:
    steps before the last are given a better accuracy, so that one of them is published, and nothing is told.
    """
    data = DatasetSplits(*(renamed(stripes(count, 16, 3)) for count in (48, 16, 16)))
    mixed = config(init=str(teacher), head_init="probe", wise_ft_alpha=0.5, optim=OptimConfig(lr=1e-2), steps=6)
    answers: list[EvalOutputs] = []
    seen: dict[float, torch.Tensor] = {}
    evaluate_really, compute = run_module.evaluate_split, EvalOutputs.metrics

    def watched(model: nn.Module, *rest: Any, **more: Any) -> EvalOutputs:
        if len(answers) == 4:  # the test set comes last
            return evaluate_really(model, *rest, **more)
        answers.append(evaluate_really(model, *rest, **more))
        if len(answers) > 1:  # the evaluation of the third step comes first
            seen[(0.5, 0.0, 1.0)[len(answers) - 2]] = model.state_dict()["head.weight"].clone()
        return answers[-1]

    def spoilt(self: EvalOutputs) -> dict[str, float | int]:
        place = next((i for i, each in enumerate(answers) if each is self), None)
        if place is None:  # the test set
            return compute(self)
        share = (0.5, 0.5, 0.0, 1.0)[place]
        return {**compute(self), "top1": float(earlier) if place == 0 else 0.5, "nll": 1.0 + (share != best)}

    monkeypatch.setattr(run_module, "evaluate_split", watched)
    monkeypatch.setattr(EvalOutputs, "metrics", spoilt)
    outcome = train(mixed, tmp_path / "run", splits=data)
    assert outcome is not None
    assert len(answers) == 4
    torch.testing.assert_close(seen[0.5], (seen[0.0] + seen[1.0]) / 2)
    assert not torch.equal(seen[0.0], seen[1.0])
    notes = [n for n in outcome.notes if n.code == "interpolation_not_kept"]
    shipped = read_checkpoint(tmp_path / "run").tensors["head.weight"]
    if earlier:
        assert outcome.best_step == 3
        assert not notes
        assert not any(torch.equal(shipped, each) for each in seen.values())
    else:
        assert outcome.best_step == 6
        assert torch.equal(shipped, seen[best])
        assert len(notes) == (told is not None)
        assert all(told and n.startswith(told) for n in notes)


def other_classes() -> DatasetSplits:
    return DatasetSplits(*(renamed(stripes(count, 16, 3)) for count in (48, 16, 16)))


def model_of(path: Path) -> dict[str, Any]:
    """The model in the config.json or the model.json of a run."""
    found = json.loads(path.read_text())["config"]
    return found["model"] if path.name == "config.json" else found


@pytest.mark.parametrize("image_size", [None, 32])
def test_config_json_describes_the_model_that_is_trained(teacher: Path, tmp_path: Path, image_size: int | None) -> None:
    """The architecture of `init`, not the ViT-B/16 that is the default; with the dropout that the run asks for."""
    run, given = tmp_path / "run", ViTConfig(drop_path=0.1)
    train(config(init=str(teacher), model=given, image_size=image_size), run, splits=other_classes())
    found = model_of(run / "config.json")
    assert found == model_of(run / "model.json")
    assert (found["embed_dim"], found["num_classes"], found["drop_path"]) == (16, 4, 0.1)
    assert found["image_size"] == [image_size or 16] * 2
    train(config(steps=1), tmp_path / "scratch", splits=make_splits())
    assert model_of(tmp_path / "scratch/config.json") == model_of(tmp_path / "scratch/model.json")


class Dies(Callback):
    """Ends a run after a step, as a kill does: nothing is saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_log(self, row: dict[str, Any]) -> None:
        if row["step"] == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("former", [False, True], ids=["resolved", "config of an older version"])
def test_a_finetuning_run_is_resumed_whatever_model_its_config_has(teacher: Path, tmp_path: Path, former: bool) -> None:
    """Older versions wrote the config as it was given; the architecture comes from `init` either way."""
    tuned = config(
        init=str(teacher), model=ViTConfig(drop_path=0.1), head_init="probe", image_size=32, steps=6, ema=0.5
    )
    train(tuned, tmp_path / "whole", splits=other_classes())
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):  # the first checkpoint is that of step 3
        train(tuned, run, splits=other_classes(), callbacks=(Dies(4),))
    assert model_of(run / "config.json") == model_of(tmp_path / "whole/config.json")
    if former:
        resolved = json.loads((run / "config.json").read_text())
        given = {**resolved["config"], "model": tuned.model.to_json()}
        (run / "config.json").write_text(json.dumps({**resolved, "config": given}))
    resume(run, splits=other_classes())
    assert (run / "config.json").read_bytes() == (tmp_path / "whole/config.json").read_bytes()
    assert (run / "model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


def test_a_kill_before_the_weights_are_read_leaves_a_run_to_resume(teacher: Path, tmp_path: Path) -> None:
    run = create_run_dir(config(init=str(teacher), model=ViTConfig()), tmp_path / "run")
    assert model_of(run / "config.json")["embed_dim"] == 768, "nothing is known of the weights yet"
    resume(run, splits=other_classes())
    assert model_of(run / "config.json") == model_of(run / "model.json")


def test_what_a_run_has_told_outlives_a_stop(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe is learnt before the first step only, yet the report of a resumed run tells of it, and of all steps."""
    stop = types.SimpleNamespace(signal=None)  # test_resume.py has real signals

    class Stopper(Callback):
        def on_log(self, row: dict[str, Any]) -> None:
            if row["step"] == 3:
                stop.signal = signal.SIGTERM

    data = DatasetSplits(*(renamed(stripes(count, 16, 3)) for count in (48, 16, 16)))
    begun = config(init=str(teacher), head_init="probe", steps=12)
    with monkeypatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(run_module, "StopSignal", lambda: contextlib.nullcontext(stop))
        train(begun, tmp_path / "run", splits=data, callbacks=(Stopper(),))
    outcome = resume(tmp_path / "run", splits=data)
    assert outcome is not None
    assert [n.code for n in outcome.notes].count("head_probed") == 1
    text = outcome.report.read_text()
    assert "linear probe" in text
    assert "4 epochs, 12 steps" in text


def test_what_is_assumed_of_weights_is_told(tmp_path: Path) -> None:
    model = pw.build_model(pw.ViTConfig(image_size=(32, 32), patch_size=(16, 16), embed_dim=192, depth=1, num_heads=3))
    write_checkpoint(tmp_path / "model.safetensors", Checkpoint(model.config, model.state_dict(), None), "timm")
    made = Trainer(
        config(init=str(tmp_path / "model.safetensors"), model=ViTConfig()),
        make_splits(channels=3),
        ProcessGroup(),
        fresh=True,
    )
    codes = {note.code for note in made.notes}
    assert "preprocess_assumed" in codes and "head_replaced" not in codes, "replacing the head is intended"


def test_a_share_of_the_start_needs_weights_to_start_from() -> None:
    with pytest.raises(ConfigError, match="wise_ft_alpha .* needs init"):
        config(wise_ft_alpha=0.7)


def test_answers_that_are_no_numbers_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(self: ModelEma, model: nn.Module, step: int) -> None:
        next(self.model.parameters()).fill_(math.nan)

    monkeypatch.setattr(ModelEma, "update", spoil)
    with pytest.raises(TrainingError, match="validation") as error:
        train(config(ema=0.5), tmp_path / "run", splits=make_splits())
    assert error.value.code == "not_finite"


def test_freezing_the_first_third() -> None:
    third = Config(init="weights", freeze=("first-third",))
    model = pw.build_model(TINY.replace(depth=3))
    freeze(model, third)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert {n[:8] if n.startswith("blocks") else n.split(".")[0] for n in trained} == {
        "blocks.1", "blocks.2", "norm", "head"
    }  # fmt: skip
    resnet = pw.build_model(ResNetConfig(image_size=(8, 8), in_channels=1, layers=(1,), kind="cifar"))
    freeze(resnet, third)
    assert all(p.requires_grad for p in resnet.parameters()), "it has no blocks to count"
    with pytest.raises(ConfigError, match="needs init"):
        load_recipe("finetune").replace(init=None)


def test_gradient_checkpointing_changes_nothing() -> None:
    assert losses(trainer(model=TINY.replace(grad_checkpointing=True)), 3) == pytest.approx(
        losses(trainer(), 3), abs=1e-6
    )


def test_fine_tuning_replaces_the_head(teacher: Path, tmp_path: Path) -> None:
    data = DatasetSplits(stripes(48, 16, 3, classes=2), stripes(16, 16, 3, classes=2))
    start = Trainer(config(init=str(teacher)), data, ProcessGroup(), fresh=True)
    assert start.model.head.weight.shape == (2, 16)
    assert not start.model.head.weight.any()
    solved = Trainer(config(init=str(teacher), head_init="probe"), data, ProcessGroup(), fresh=True)
    assert solved.model.head.weight.any()
    assert solved.notes[-1].code == "head_probed"
    kept = Trainer(
        config(init=str(teacher)), DatasetSplits(stripes(16, 16, 3), stripes(16, 16, 3)), ProcessGroup(), fresh=True
    )
    torch.testing.assert_close(dict(kept.model.state_dict()), dict(read_checkpoint(teacher).tensors))
    larger = Trainer(config(init=str(teacher), image_size=32), data, ProcessGroup(), fresh=True)
    assert larger.model.config.image_size == (32, 32) == larger.preprocess.size


def test_a_probed_head_beats_zeros_from_the_first_step(teacher: Path, tmp_path: Path) -> None:
    data = DatasetSplits(stripes(48, 16, 3, classes=2), stripes(16, 16, 3, classes=2))
    found = {}
    for head in ("zero", "probe"):
        run = config(init=str(teacher), head_init=head, steps=1, optim=OptimConfig(lr=1e-6))
        outcome = train(run, tmp_path / head, splits=data)
        assert outcome is not None
        found[head] = outcome.metrics["val"]["nll"]
    assert found["probe"] < 0.6 * found["zero"]


def test_a_head_for_the_same_pictures_by_other_names_recalls_the_old_one(tmp_path: Path) -> None:
    """From three pictures a class, one with the wrong label: the head that came with the weights knows better."""
    train(config(steps=120, optim=OptimConfig(lr=1e-2)), tmp_path / "base", splits=make_splits())
    few, many, names = stripes(12), stripes(64), ["p", "q", "r", "s"]
    wrong = np.where(np.arange(12) < 4, (few.targets + 1) % 4, few.targets)
    named = ArraySource(few.images, names, wrong), ArraySource(many.images, names, many.targets)
    run = config(init=str(tmp_path / "base"), head_init="probe", batch_size=4)
    made = Trainer(run, DatasetSplits(*named), ProcessGroup(), fresh=True)
    assert any("pretrained head" in note for note in made.notes), made.notes
    made.model.eval()
    batch = next(iter(made.val.eval_batches(64)))
    assert (made.model(batch.images).argmax(1) == batch.targets).float().mean() > 0.9


@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("two_heads", [True, False])
def test_distillation(kind: Any, two_heads: bool, teacher: Path) -> None:
    """The student learns what the teacher says, though the labels say otherwise: the teacher is all of the loss."""
    data = DatasetSplits(stripes(32, 16, 3), stripes(8, 16, 3))
    student = TINY.replace(in_channels=3, distillation=two_heads)
    distill = DistillConfig(teacher=str(teacher), kind=kind, weight=1.0)
    run = config(model=student, distill=distill, optim=OptimConfig(lr=3e-3), steps=60)
    made = Trainer(run, data, ProcessGroup(), fresh=True)
    assert made.teacher is not None
    made.start_loader()
    found = losses(made, 60)
    assert np.mean(found[-5:]) < np.mean(found[:5])


def test_a_teacher_sees_whole_pictures_where_the_student_has_small_ones(teacher: Path) -> None:
    data = DatasetSplits(stripes(32, 16, 3), stripes(8, 16, 3))
    model = TINY.replace(in_channels=3, image_size=16)
    run = config(
        model=model, distill=DistillConfig(teacher=str(teacher)), progressive_resize=ProgressiveResizeConfig(0.5, 1.0)
    )
    made = Trainer(run, data, ProcessGroup(), fresh=True)
    made.start_loader()
    made.is_first_phase = True
    batch = next(iter(made.batches))
    inputs = made.prepare_inputs(batch)
    assert made.teacher is not None
    assert inputs["images"].shape[-1] == 8
    torch.testing.assert_close(inputs["teacher_logits"], made.teacher(batch.images))


def test_both_heads_learn_where_there_is_no_teacher(tmp_path: Path) -> None:
    model = TINY.replace(distillation=True)
    outcome = train(config(model=model, steps=120, optim=OptimConfig(lr=1e-2)), tmp_path / "run", splits=make_splits())
    assert outcome is not None
    assert outcome.metrics["test"]["top1"] > 0.9
    learnt = read_checkpoint(tmp_path / "run").tensors
    assert learnt["head_distilled.weight"].abs().max() > 0.1 * learnt["head.weight"].abs().max() > 0


def test_a_resnet_of_ours_teaches(tmp_path: Path) -> None:
    model = ResNetConfig(image_size=32, layers=(1,), num_classes=4)
    preprocess = pw.Preprocess((32, 32), mean=(0.4,) * 3, std=(0.2,) * 3)
    write_checkpoint(
        tmp_path / "r", Checkpoint(model, pw.build_model(model).state_dict(), preprocess, stripes().labels[::-1])
    )
    run = config(model=TINY.replace(in_channels=3), distill=DistillConfig(teacher=str(tmp_path / "r"), kind="soft"))
    made = Trainer(run, DatasetSplits(stripes(32, 8, 3), stripes(8, 8, 3)), ProcessGroup(), fresh=True)
    made.start_loader()
    assert all(math.isfinite(loss) for loss in losses(made, 2))
    assert made.teacher is not None
    assert made.teacher.class_order is not None
    assert made.teacher.class_order.tolist() == [3, 2, 1, 0]


def test_a_teacher_of_other_classes_is_refused(teacher: Path) -> None:
    run = config(model=TINY.replace(in_channels=3), distill=DistillConfig(teacher=str(teacher)))
    with pytest.raises(ConfigError, match="4 classes, but the data has 2"):
        Trainer(
            run, DatasetSplits(stripes(8, 16, 3, classes=2), stripes(8, 16, 3, classes=2)), ProcessGroup(), fresh=True
        )


def test_a_teacher_may_know_the_classes_by_other_names() -> None:
    """A folder of WordNet ids and a teacher that says "tench, Tinca tinca", or has no labels at all."""
    ids, names = zip(*imagenet_classes(), strict=True)
    backwards = list(range(999, -1, -1))
    for teacher in (names, None):
        order = match_teacher_classes("t", teacher, 1000, ids[::-1])
        assert order is not None
        assert order.tolist() == backwards
    with pytest.raises(ConfigError, match="t does not have the classes of the data.*bird"):
        match_teacher_classes("t", ("cat", "dog"), 2, ("cat", "bird"))
    with pytest.raises(ConfigError, match="two classes of the data match one"):
        match_teacher_classes("t", ("cat, kitty", "dog"), 2, ("cat", "kitty"))


def test_several_labels(tmp_path: Path) -> None:
    source = stripes(64)
    targets = np.eye(4, dtype=np.float32)[source.targets]
    targets[:, 0] = 1  # every picture has two labels, or is of the first class
    multi_label = from_arrays(source.images, targets, labels=source.labels)
    outcome = train(
        config(steps=300, optim=OptimConfig(lr=1e-2)), tmp_path / "run", splits=DatasetSplits(multi_label, multi_label)
    )
    assert outcome is not None
    assert outcome.metrics["val"]["map"] > 0.95
    assert outcome.metrics["val"]["f1"] > 0.9
    scores = pw.Classifier.load(tmp_path / "run")(multi_label.read(1, mode="L")).scores
    assert sum(s.probability > 0.5 for s in scores) == 2  # probabilities of their own, which need not sum to one


def test_label_smoothing_is_torchs() -> None:
    objective = make_objective(config(label_smoothing=0.1), np.arange(4), 4)
    logits, targets = torch.randn(8, 4), torch.arange(8) % 4
    expected = nn.functional.cross_entropy(logits, targets, label_smoothing=0.1)
    torch.testing.assert_close(objective.label_loss(logits, targets), expected)


def test_statistics_come_from_the_data_or_the_weights(teacher: Path) -> None:
    assert trainer().preprocess.mean[0] == pytest.approx(stripes().images.mean() / 255, abs=0.01)
    made = Trainer(
        config(init=str(teacher)), DatasetSplits(stripes(8, 16, 3), stripes(8, 16, 3)), ProcessGroup(), fresh=True
    )
    assert made.preprocess.mean == (0.5, 0.5, 0.5)


def test_unreadable_pictures_are_skipped_and_told(tmp_path: Path) -> None:
    from PIL import Image

    for split, count in (("train", 12), ("val", 6)):
        for i in range(count):
            path = tmp_path / f"data/{split}/{'ab'[i % 2]}/{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), 255 * (i % 2)).save(path)
    (tmp_path / "data/train/a/0.png").write_bytes(b"nothing")
    (tmp_path / "data/val/b/1.png").write_bytes(b"nothing")
    run = config(data=DataConfig(source=str(tmp_path / "data"), num_workers=2), batch_size=4, steps=6)
    outcome = train(run, tmp_path / "run")
    assert outcome is not None
    assert outcome.metrics["val"]["n"] == 5
    notes = [n for n in outcome.notes if n.code == "images_unreadable"]
    assert outcome.num_unreadable == len(notes) == 2
    assert "train" in notes[0]
    assert "0.png" in notes[0]
    for path in (tmp_path / "data").rglob("*.png"):
        path.write_bytes(b"nothing")
    with pytest.raises(DataError, match="read"):
        train(run, tmp_path / "again")


def test_overrides() -> None:
    base = load_recipe("finetune")
    changed = apply_overrides(
        base, {"optim.lr": 3e-5, "budget": "1h30m", "augment": "medium", "model": "S/16", "loggers": "wandb"}
    )
    assert (changed.optim.lr, changed.budget, changed.augment.randaug_magnitude) == (3e-5, 5400.0, 15)
    assert isinstance(changed.model, ViTConfig)
    assert changed.model.embed_dim == 384
    assert changed.loggers == ("wandb",)
    for path, named in (
        ("optim.lrr", "Did you mean lr"),
        ("optim.lr.x", "no field x"),
        ("nothing", "no field nothing"),
    ):
        with pytest.raises(ConfigError, match=named):
            apply_overrides(base, {path: 1})
    assert base.freeze == apply_overrides(base, {"epochs": 1}).freeze == ("first-third",)
    for change in ({"model": "S/16"}, {"init": "none"}, {"lora_rank": 8}):
        assert apply_overrides(base, change).freeze == (), "new weights must learn"
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
    assert apply_overrides(scratch, {"steps": 5}).budget is None, "the length that is given replaces the recipe's"
    assert apply_overrides(scratch, {"epochs": 5}).budget is None
    assert apply_overrides(scratch, {"data": "photos"}).data.source == "photos"
    assert changed.init is None
    assert apply_overrides(base, {"init": "none"}).init is None
    assert apply_overrides(base, {"model.drop_path": 0.1}).init == base.init
    with pytest.raises(ConfigError, match=r"model\.depth would have no effect.*hf:timm.*--image-size"):
        apply_overrides(base, {"model.depth": 6, "model.drop_path": 0.1})
    assert apply_overrides(base, {"model": "S/16", "model.depth": 6}).model.depth == 6
    for both in ({"steps": 5, "budget": "1m"}, {"model": "S/16", "init": "hf:a/b"}):
        with pytest.raises(ConfigError):
            apply_overrides(base, both)
    assert parse_duration("90") == 90
    assert parse_duration("1.5h") == 5400
    for wrong in ("", "10x", "m10", "1h-3m"):
        with pytest.raises(ConfigError, match="not a duration"):
            parse_duration(wrong)


def test_tensorboard(tmp_path: Path) -> None:
    from patchword.training.loggers import make_loggers

    run = config(loggers=("tensorboard",))
    train(run, tmp_path / "run", splits=make_splits(), callbacks=make_loggers(run))
    assert list((tmp_path / "run/tensorboard").glob("events.*"))
    with pytest.raises(ConfigError, match=r"\.\[log\]"):
        make_loggers(config(loggers=("mlflow", "wandb")))


def test_the_command_line_trains_and_answers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "patchword", "train", "quickstart", "--steps", "3", "--out", "run", "--json"]
    command += [
        "--model.depth",
        "1",
        "--model.embed-dim",
        "24",
        "--optim.betas",
        "0.9",
        "0.95",
        "--freeze",
        "stem",
        "norm",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["steps"] == 3
    assert said["test"]["n"] == 359
    assert "top1" in done.stderr
    kept = json.loads((tmp_path / "run/config.json").read_text())["config"]
    assert (kept["model"]["depth"], kept["optim"]["betas"], kept["freeze"]) == (1, [0.9, 0.95], ["stem", "norm"])
    again = subprocess.run(
        [sys.executable, "-m", "patchword", "resume", "run"], cwd=tmp_path, capture_output=True, text=True
    )
    assert again.returncode == 2
    assert "is finished" in again.stderr
    assert "Traceback" not in again.stderr


def test_small_pictures_first(tmp_path: Path) -> None:
    """Steps of the first part see small pictures, the others whole ones; the model that comes out takes whole ones."""
    sizes: list[int] = []
    made = trainer(progressive_resize=ProgressiveResizeConfig(0.6, 0.5))
    made.model.register_forward_pre_hook(lambda module, inputs: sizes.append(inputs[0].shape[-1]))
    for step in range(6):
        made.train_step(step / 6)
    assert sizes == [4, 4, 4, 8, 8, 8], "0.6 of eight pixels, in whole patches of two"
    outcome = train(
        config(steps=6, progressive_resize=ProgressiveResizeConfig(0.1)), tmp_path / "run", splits=make_splits()
    )
    assert outcome is not None
    assert outcome.metrics["test"]["n"] == 20
    trainer(
        progressive_resize=ProgressiveResizeConfig(0.5),
        model=TINY.replace(pos_embed="relative", attention_pattern="local", window_size=3),
    ).train_step(0.0)
    with pytest.raises(ConfigError, match="progressive_resize"):
        trainer(progressive_resize=ProgressiveResizeConfig(0.5), model=TINY.replace(pos_embed="rotary"))


def test_gradients_of_shares_lie_in_memory_as_their_weights() -> None:
    """LoRA's matrices get transposed gradients, of which fused AdamW sees the memory only."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        shared = trainer(batch_size=32, lora_rank=2)
        assert shared.cpu_parallel is not None
        losses(shared, 2)
        shared.compute_gradients([next(shared.batches)])
    finally:
        torch.set_num_threads(before)
    assert all(p.grad is not None and p.grad.stride() == p.stride() for p in shared.parameters)


@pytest.mark.parametrize("stem", ["linear", "conv"])
def test_shares_on_several_cores(stem: Any) -> None:
    """Gradients of a batch in two shares are those of the whole (batch norm apart), and the same every time."""
    model = TINY.replace(stem=stem, stem_layers=(8,) if stem == "conv" else (), patch_size=(2, 2))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        made = [trainer(model=model, batch_size=64, steps=3) for _ in range(3)]
        assert all(m.cpu_parallel is not None and len(m.cpu_parallel.replicas) == 2 for m in made)
        made[2].cpu_parallel = None
        first, again, whole = (losses(m, 3) for m in made)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert first == again
    states = [m.model.state_dict() for m in made]
    assert all(torch.equal(states[0][n], states[1][n]) for n in states[0])
    if stem == "linear":
        torch.testing.assert_close(torch.tensor(first), torch.tensor(whole))
        for name, value in states[0].items():
            torch.testing.assert_close(value, states[2][name], rtol=1e-3, atol=1e-5)
    else:
        means = [s["stem.2.running_mean"] for s in states]
        torch.testing.assert_close(means[0], means[2], rtol=0.1, atol=0.05)
    for changes in ({"dropout": 0.1}, {"drop_path": 0.1}):
        assert trainer(model=TINY.replace(**changes)).cpu_parallel is None, "threads would draw from one generator"
