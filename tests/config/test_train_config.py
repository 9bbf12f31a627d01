"""Every validation rule of training configs: the error names the full path, the limits and the value."""

import re
from typing import Any

import pytest

from patchword.config import Config, ViTConfig
from patchword.errors import ConfigError

INVALID = [
    ("data.val_fraction", 0, ["0", "1"]),
    ("data.val_fraction", 1, ["0", "1"]),
    ("data.train_fraction", 0, ["0", "1"]),
    ("data.train_fraction", 1.1, ["0", "1"]),
    ("data.num_workers", -1, ["0", "256"]),
    ("data.num_workers", 257, ["0", "256"]),
    ("data.cache_gib", -0.5, ["0"]),
    ("augment.flip", 1.5, ["0", "1"]),
    ("augment.random_erasing", -0.1, ["0", "1"]),
    ("augment.cutout", 2, ["0", "1"]),
    ("augment.shift_limit", 1.01, ["0", "1"]),
    ("augment.color_jitter", 1.5, ["0", "1"]),
    ("augment.mixup", -1, ["0", "100"]),
    ("augment.cutmix", 101, ["0", "100"]),
    ("augment.randaug_ops", 17, ["0", "16"]),
    ("augment.randaug_magnitude", 31, ["0", "30"]),
    ("augment.scale", (0.0, 1.0), ["fractions"]),
    ("augment.scale", (0.9, 0.5), ["fractions"]),
    ("augment.scale", (0.5, 1.5), ["fractions"]),
    ("augment.ratio", (0.0, 1.0), ["aspect ratios"]),
    ("augment.ratio", (2.0, 1.0), ["aspect ratios"]),
    ("optim.lr", 0, ["0"]),
    ("optim.lr", -1, ["0"]),
    ("optim.muon_lr", 0, ["0"]),
    ("optim.weight_decay", -0.1, ["0"]),
    ("optim.clip_grad_norm", -1, ["0"]),
    ("optim.sam_rho", -1, ["0"]),
    ("optim.head_lr_scale", -1, ["0"]),
    ("optim.betas", (0.9, 1.0), ["0", "1"]),
    ("optim.momentum", 1, ["0", "1"]),
    ("optim.layer_decay", 0, ["0", "1"]),
    ("optim.layer_decay", 1.1, ["0", "1"]),
    ("schedule.warmup_fraction", -0.1, ["0", "1"]),
    ("schedule.cooldown_fraction", 1.1, ["0", "1"]),
    ("schedule.min_lr_ratio", 2, ["0", "1"]),
    ("distill.weight", 1.5, ["0", "1"]),
    ("distill.temperature", 0, ["0"]),
    ("progressive_resize.scale", 0, ["0", "1"]),
    ("progressive_resize.scale", 1.5, ["0", "1"]),
    ("progressive_resize.fraction", -1, ["0", "1"]),
    ("name", "", ["slashes"]),
    ("name", "a/b", ["slashes"]),
    ("seed", -1, ["0", "2**63"]),
    ("seed", 2**63, ["0", "2**63"]),
    ("epochs", 0, ["0"]),
    ("steps", 0, ["0"]),
    ("budget", 0, ["0"]),
    ("batch_size", 0, ["1", "1,048,576"]),
    ("batch_size", 2**20 + 1, ["1", "1,048,576"]),
    ("grad_accum_steps", 3, ["batch_size", "128"]),
    ("grad_accum_steps", 0, ["batch_size", "128"]),
    ("num_threads", 0, ["1", "1,024"]),
    ("ema", 1, ["0", "1"]),
    ("wise_ft_alpha", 0, ["0", "1"]),
    ("label_smoothing", 1, ["0", "1"]),
    ("eval_every", 0, ["0"]),
    ("save_every", -1, ["0"]),
    ("keep_last", 0, ["1"]),
    ("lora_rank", 1025, ["0", "1,024"]),
]


def nested(path: str, value: Any) -> dict[str, Any]:
    """{"optim": {"lr": value}} for "optim.lr"."""
    *sections, name = path.split(".")
    return {sections[0]: {name: value}} if sections else {name: value}


@pytest.mark.parametrize(("path", "value", "limits"), INVALID)
def test_out_of_range(path: str, value: Any, limits: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        Config.from_json(nested(path, value))
    assert error.value.code == "invalid_config"
    given = [str(value), str(float(value))] if isinstance(value, int) else [str(value)]
    pattern = " .*".join([re.escape(path), *(rf"\b{re.escape(limit)}\b.*" for limit in limits)])
    assert re.fullmatch(rf"{pattern} ({'|'.join(map(re.escape, given))})\.", str(error.value)), str(error.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"steps": 5, "budget": 60}, ["steps 5", "budget 60"]),
        ({"wise_ft_alpha": 0.5}, ["wise_ft_alpha 0.5", "init"]),
        ({"lora_rank": 4, "freeze": ["blocks."]}, ["lora_rank 4", "freeze"]),
        ({"freeze": ["first-third"]}, ["'first-third'", "init"]),
        ({"model": {"distillation": True}, "data": {"source": "digits"}}, ["model.distillation", "distill.teacher"]),
        (
            {"schedule": {"warmup_fraction": 0.6, "cooldown_fraction": 0.5}},
            ["schedule.warmup_fraction 0.6", "schedule.cooldown_fraction 0.5"],
        ),
    ],
)
def test_contradictions(values: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        Config.from_json(values)
    assert error.value.code == "invalid_config"
    assert not [text for text in expected if text not in str(error.value)], str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        {"init": "a", "wise_ft_alpha": 0.5},
        {"init": "a", "freeze": ["first-third"]},
        {"lora_rank": 4},
        {"freeze": ["blocks."]},
        {"model": {"distillation": True}, "data": {"source": "digits"}, "distill": {"teacher": "b"}},
        {"model": {"distillation": True}, "data": {"source": "digits"}, "init": "a"},
        {"batch_size": 1, "keep_last": 1, "save_every": 0, "num_threads": 1024},
        {"augment": {"scale": [1, 1], "ratio": [1, 1], "flip": 1, "cutout": 1}},
        {"optim": {"weight_decay": 0, "clip_grad_norm": 0, "head_lr_scale": 0, "betas": [0, 0]}},
        {"schedule": {"warmup_fraction": 0.5, "cooldown_fraction": 0.5, "min_lr_ratio": 1}},
        {"schedule": {"warmup_fraction": 0, "cooldown_fraction": 1, "min_lr_ratio": 0}},
        {"data": {"train_fraction": 1, "num_workers": 0, "cache_gib": 0}},
        {"data": {"num_workers": 256}},
        {"augment": {"mixup": 0, "cutmix": 100, "randaug_ops": 16, "randaug_magnitude": 30, "color_jitter": 1}},
        {"augment": {"mixup": 100, "cutmix": 0, "randaug_ops": 0, "randaug_magnitude": 0, "random_erasing": 1}},
        {"augment": {"shift_limit": 1, "flip": 0, "cutout": 0}},
        {"optim": {"momentum": 0, "layer_decay": 1, "sam_rho": 0}},
        {"distill": {"weight": 0}, "progressive_resize": {"scale": 1, "fraction": 0}},
        {"distill": {"weight": 1}, "progressive_resize": {"scale": 0.5, "fraction": 1}},
        {"seed": 0, "ema": 0, "label_smoothing": 0, "lora_rank": 1024, "wise_ft_alpha": 1},
        {"seed": 2**63 - 1, "batch_size": 2**20, "grad_accum_steps": 2**20, "num_threads": 1},
    ],
)
def test_limits_are_valid(values: dict[str, Any]) -> None:
    assert Config.from_json(values)


def test_sections_have_defaults() -> None:
    config = Config()
    assert isinstance(config.model, ViTConfig)
    assert (config.optim.name, config.schedule.shape, config.augment.crop) == ("adamw", "cosine", "none")
    assert config.init is config.steps is config.budget is None
