"""The model at step 0: from scratch or from pretrained weights, with frozen weights and LoRA."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..checkpoints import Checkpoint, read_checkpoint
from ..config import Config, ModelConfig, Size, ViTConfig
from ..config.model import REGULARIZATION_FIELDS
from ..data.channel_stats import compute_channel_stats
from ..data.preprocess import Preprocess
from ..data.sources import ArraySource, DatasetSplits
from ..errors import ConfigError, Note
from ..evaluation.logistic_probe import LogisticModel
from ..models import Model, build_model, optimize_for_cpu
from ..models.lora import add_lora
from .distributed import ProcessGroup
from .optimizers import layer_index

ALL_BUT_HEAD, FIRST_THIRD = "all-but-head", "first-third"  # values of `freeze` that are not prefixes of names
PHOTO_CROP = 0.875  # center crop at evaluation for models that are trained on random resized crops


@dataclass(frozen=True)
class InitialState:
    """What a run starts from.

    Attributes:
        model: The model at step 0.
        preprocess: How images are prepared for it.
        config: The configuration with the model's actual architecture.
        provenance: Where the pretrained weights come from; empty from scratch.
        has_new_head: Whether the pretrained head was replaced.
        pretrained_head: The head that was replaced, if there was one.
        notes: What was assumed when reading the weights.
    """

    model: Model
    preprocess: Preprocess
    config: Config
    provenance: dict[str, Any]
    has_new_head: bool
    pretrained_head: LogisticModel | None = None
    notes: tuple[Note, ...] = ()


def make_initial_state(config: Config, splits: DatasetSplits) -> InitialState:
    """Make the model at step 0, which depends only on configuration, data and pretrained weights."""
    torch.manual_seed(config.seed)
    state = init_from_weights(config, splits) if config.init else init_from_scratch(config, splits)
    freeze(state.model, config)
    optimize_for_cpu(state.model)
    return state


def make_sharded_state(config: Config, splits: DatasetSplits, group: ProcessGroup) -> InitialState:
    """Make the model at step 0 in the main process; the others get one without values, on the meta device."""
    states: list[InitialState] = []

    def make() -> dict[str, Any]:
        states.append(make_initial_state(config, splits))
        small = {field.name: getattr(states[0], field.name) for field in fields(InitialState)}
        return {**small, "model": None, "pretrained_head": None}

    shared = group.run_on_main(make)
    if states:
        return states[0]
    with torch.device("meta"):
        model = build_model(shared["config"].model)
        freeze(model, shared["config"])
    return InitialState(**{**shared, "model": optimize_for_cpu(model)})


def first_phase_size(config: Config) -> Size | None:
    """Return the image size of the first phase of progressive resizing, in whole patches; None if there is none."""
    model = config.model
    if config.progressive_resize.scale == 1 or config.progressive_resize.fraction == 0:
        return None
    stride = model.stride if isinstance(model, ViTConfig) else (1, 1)
    height, width = (
        max(1, round(n * config.progressive_resize.scale / s)) * s
        for n, s in zip(model.image_size, stride, strict=True)
    )
    return height, width


def init_from_scratch(config: Config, splits: DatasetSplits) -> InitialState:
    """Build a randomly initialized model, normalized by the statistics of the training set."""
    model_config = config.model.replace(num_classes=len(splits.train.labels))
    if config.image_size:
        model_config = model_config.replace(image_size=config.image_size)
    if model_config.in_channels not in (1, 3):
        raise ConfigError(f"model.in_channels is {model_config.in_channels}, but images have 1 or 3 channels.")
    mode: Literal["L", "RGB"] = "L" if model_config.in_channels == 1 else "RGB"
    size = model_config.image_size
    mean, std = compute_channel_stats(splits.train, mode, size)
    are_photos = config.augment.crop == "resized" and not isinstance(splits.train, ArraySource)
    preprocess = Preprocess(size, crop=PHOTO_CROP if are_photos else 1.0, mean=mean, std=std)
    config = config.replace(model=model_config)
    return InitialState(build_model(model_config), preprocess, config, {}, has_new_head=False)


def init_from_weights(config: Config, splits: DatasetSplits) -> InitialState:
    """Load the weights of `init`, with a new head unless the labels are the same."""
    assert config.init is not None
    checkpoint = read_checkpoint(config.init)
    labels, notes = splits.train.labels, checkpoint.notes  # before `adapt`, whose notes only repeat the configuration
    keeps_head = checkpoint.labels == labels
    pretrained_head = None if keeps_head else extract_head(checkpoint)
    if not keeps_head:
        checkpoint = replace(checkpoint.adapt(num_classes=0), temperature=1.0)
        checkpoint = checkpoint.adapt(num_classes=len(labels))
    if config.image_size:
        checkpoint = checkpoint.adapt(image_size=config.image_size)
    checkpoint = set_regularization(checkpoint, config.model)
    if checkpoint.preprocess is None:
        channels = checkpoint.config.in_channels
        raise ConfigError(f"init: {config.init} has {channels} input channels, but images have 1 or 3.")
    provenance = {"init": config.init, "of": checkpoint.provenance}
    config = config.replace(model=checkpoint.config)
    model = checkpoint.build_model().train()
    return InitialState(model, checkpoint.preprocess, config, provenance, not keeps_head, pretrained_head, notes)


def extract_head(checkpoint: Checkpoint) -> LogisticModel | None:
    """Return the linear head of a checkpoint, if it has one."""
    tensors = checkpoint.tensors
    if not checkpoint.config.num_classes or "head.bias" not in tensors:
        return None
    return LogisticModel(tensors["head.weight"].double().T, tensors["head.bias"].double())


def set_regularization(checkpoint: Checkpoint, wanted: ModelConfig) -> Checkpoint:
    """Use the run's dropout and drop path, which have no weights."""
    if not (isinstance(wanted, ViTConfig) and isinstance(checkpoint.config, ViTConfig)):
        return checkpoint
    values = {name: getattr(wanted, name) for name in REGULARIZATION_FIELDS}
    return replace(checkpoint, config=checkpoint.config.replace(**values))


def freeze(model: Model, config: Config) -> None:
    """Freeze weights as `freeze` and `lora_rank` say."""
    if config.lora_rank:
        if not isinstance(model.config, ViTConfig):
            raise ConfigError("lora_rank is for the attention of a ViT, and this model has none. Set it to 0.")
        add_lora(model, config.lora_rank)
    depth = len(getattr(model, "blocks", ()))
    names = [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        if is_frozen(name, config.freeze, depth):
            parameter.requires_grad_(False)
    keywords = (ALL_BUT_HEAD, FIRST_THIRD)  # a model without blocks has no first third
    unmatched = [f for f in config.freeze if f not in keywords and not any(is_frozen(n, (f,), depth) for n in names)]
    if unmatched:
        prefixes = sorted({n.split(".")[0] for n in names})
        raise ConfigError(f"freeze: no weight begins with {', '.join(unmatched)}. There are {', '.join(prefixes)}.")
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("freeze: all weights are frozen, so there is nothing to train.")


def set_train_mode(model: nn.Module) -> None:
    """Switch to training mode, except frozen batch norms, which keep their statistics."""
    model.train()
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not any(p.requires_grad for p in module.parameters()):
            module.eval()


def is_frozen(name: str, patterns: tuple[str, ...], depth: int) -> bool:
    """Whether `freeze` matches a parameter of a model with `depth` blocks."""
    if ALL_BUT_HEAD in patterns and not name.startswith("head"):
        return True
    if FIRST_THIRD in patterns and depth and layer_index(name, depth) <= depth // 3:
        return True
    return any(name == pattern or name.startswith(f"{pattern}.") for pattern in patterns)
