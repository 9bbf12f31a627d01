"""JSON conversion and type checks of every config: every field, every recipe, every preset."""

import ast
import dataclasses
import inspect
import json
import re
import typing
from typing import Any

import pytest

from patchword.config import (
    AugmentConfig,
    Config,
    DataConfig,
    DistillConfig,
    JsonConfig,
    OptimConfig,
    ProgressiveResizeConfig,
    ResNetConfig,
    ScheduleConfig,
    ViTConfig,
)
from patchword.config.presets import AUGMENTATIONS, PRESETS, augmentation, preset
from patchword.errors import ConfigError
from patchword.recipes import RECIPES, load_recipe

CLASSES = [
    AugmentConfig,
    Config,
    DataConfig,
    DistillConfig,
    OptimConfig,
    ProgressiveResizeConfig,
    ResNetConfig,
    ScheduleConfig,
    ViTConfig,
]
FIELDS = [(cls, field.name) for cls in CLASSES for field in dataclasses.fields(cls)]


def round_trip(config: JsonConfig) -> JsonConfig:
    return type(config).from_json(json.loads(json.dumps(config.to_json())))


@pytest.mark.parametrize("cls", CLASSES)
def test_defaults_round_trip(cls: type[JsonConfig]) -> None:
    assert round_trip(cls()) == cls()
    assert cls.from_json({}) == cls()
    assert list(cls().to_json()) == [field.name for field in dataclasses.fields(cls)]


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_round_trip(name: str) -> None:
    config = load_recipe(name)
    assert round_trip(config) == config


@pytest.mark.parametrize("name", PRESETS)
def test_presets_round_trip(name: str) -> None:
    """Alone, and in a training config, where the fields of the JSON object determine the type of the model."""
    model = preset(name)
    assert round_trip(model) == model
    run = Config(model=model)
    assert round_trip(run) == run
    assert type(Config.from_json(run.to_json()).model) is type(model)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_augmentations_round_trip(name: str) -> None:
    assert round_trip(augmentation(name)) == augmentation(name)


@pytest.mark.parametrize(("cls", "name"), FIELDS)
def test_wrong_type(cls: type[JsonConfig], name: str) -> None:
    """An object that no field accepts, and None where it is not allowed."""
    wrong: list[Any] = [object()]
    if type(None) not in typing.get_args(typing.get_type_hints(cls)[name]):
        wrong.append(None)
    for value in wrong:
        with pytest.raises(ConfigError) as error:
            cls.from_json({name: value})
        assert name in str(error.value)


@pytest.mark.parametrize(("cls", "name"), FIELDS)
def test_every_field_has_a_docstring(cls: type[JsonConfig], name: str) -> None:
    """A string literal below the field: one line that ends with a period."""
    body = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
    position = next(i for i, node in enumerate(body) if isinstance(node, ast.AnnAssign) and node.target.id == name)  # type: ignore[union-attr]
    docstring = body[position + 1]
    assert isinstance(docstring, ast.Expr)
    assert isinstance(docstring.value, ast.Constant)
    text = docstring.value.value
    assert text.endswith(".")
    assert text[0].isupper()
    assert "\n" not in text


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (OptimConfig, {"lr": "fast"}, r"optim\.lr .*number.* 'fast'\."),
        (OptimConfig, {"lr": True}, r"optim\.lr .*number.* True\."),
        (OptimConfig, {"lr": float("inf")}, r"optim\.lr .*number.* inf\."),
        (OptimConfig, {"betas": 0.9}, r"optim\.betas .*list.* 0\.9\."),
        (OptimConfig, {"betas": [0.9]}, r"optim\.betas .*\b2\b.* \[0\.9\]\."),
        (OptimConfig, {"betas": [0.9, "x"]}, r"optim\.betas .*number.* 'x'\."),
        (OptimConfig, {"name": "adam"}, r"optim\.name .*'adamw', 'sgd', 'muon'.* 'adam'\."),
        (DataConfig, {"source": 3}, r"data\.source .*string.* 3\."),
        (DataConfig, {"multi_label": 1}, r"data\.multi_label .*true.*false.* 1\."),
        (Config, {"steps": 1.5}, r"steps .*integer.* 1\.5\."),
        (Config, {"steps": "many"}, r"steps .*integer.* 'many'\."),
        (Config, {"image_size": "big"}, r"image_size .*integer.*\(height, width\).* 'big'\."),
        (Config, {"optim": {"lr": "fast"}}, r"optim\.lr .*number.* 'fast'\."),
        (Config, {"optim": 3}, r"optim .*object.* int\."),
        (Config, {"model": {"depth": "x"}}, r"model\.depth .*integer.* 'x'\."),
        (Config, {"model": {"layers": [0]}}, r"model\.layers .*\b1\b.* \(0,\)\."),
    ],
)
def test_messages(cls: type[JsonConfig], values: dict[str, Any], message: str) -> None:
    """Full path, type or limit, and value; the enclosing config does not repeat the error of a section."""
    with pytest.raises(ConfigError) as error:
        cls.from_json(values)
    assert error.value.code == "invalid_config"
    assert re.fullmatch(message, str(error.value)), str(error.value)


@pytest.mark.parametrize("values", [[], "x", 3, None])
def test_not_an_object(values: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^Config .*\b{type(values).__name__}\b"):
        Config.from_json(values)


@pytest.mark.parametrize(
    ("cls", "key", "suggestion"),
    [
        (ViTConfig, "embed_dims", "embed_dim"),
        (OptimConfig, "weight_deca", "weight_decay"),
        (Config, "batchsize", "batch_size"),
        (ScheduleConfig, "warmup", "warmup_fraction"),
    ],
)
def test_unknown_key(cls: type[JsonConfig], key: str, suggestion: str) -> None:
    with pytest.raises(ConfigError) as error:
        cls.from_json({key: 1})
    assert error.value.code == "unknown_field"
    assert re.search(rf"\b{key}\b.*\b{suggestion}\?", str(error.value)), str(error.value)


def test_unknown_key_without_a_similar_one() -> None:
    with pytest.raises(ConfigError) as error:
        DistillConfig.from_json({"zzz": 1})
    assert error.value.code == "unknown_field"
    assert "?" not in str(error.value)  # no suggestion
    assert "teacher, kind, weight, temperature" in str(error.value)


def test_values_are_cast() -> None:
    """Values from JSON or the command line get the type of the field."""
    config = Config.from_json({"epochs": 3, "steps": 4.0, "freeze": ["blocks."], "image_size": 64})
    assert (config.epochs, config.steps, config.freeze, config.image_size) == (3.0, 4, ("blocks.",), (64, 64))
    assert isinstance(config.epochs, float)
    assert isinstance(config.steps, int)
    assert AugmentConfig(scale=[0.5, 1]).scale == (0.5, 1.0)  # type: ignore[arg-type]


def test_replace_validates() -> None:
    config = OptimConfig()
    assert config.replace(lr=1).lr == 1.0
    assert config.lr == 1e-3
    with pytest.raises(ConfigError):
        config.replace(lr=0)
    with pytest.raises(ConfigError) as error:
        config.replace(rate=1)
    assert error.value.code == "unknown_field"


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 1  # type: ignore[misc]
    assert hash(ViTConfig()) == hash(ViTConfig())


def test_cast_fields_casts_some_fields() -> None:
    assert ViTConfig.cast_fields({"image_size": 32}) == {"image_size": (32, 32)}
