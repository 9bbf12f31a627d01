"""From a configuration and data to a model that is ready to be trained: fresh, or from given weights."""

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..checkpoints import Checkpoint, read_checkpoint
from ..config import Config, ModelConfig, Size, ViTConfig
from ..config.model import REGULARIZATION_FIELDS
from ..data.channel_stats import channel_statistics
from ..data.preprocess import Preprocess
from ..data.sources import ArraySource, DatasetSplits
from ..errors import ConfigError, Note
from ..evaluation.logistic_probe import LogisticModel
from ..models import Model, build_model, optimize_for_cpu
from .lora import add_lora
from .optimizers import layer_of

ALL_BUT_HEAD, FIRST_THIRD = "all-but-head", "first-third"  # what `freeze` knows besides names
PHOTO_CROP = 0.875  # evaluation sees this part of a photograph, where training sees random parts


@dataclass(frozen=True)
class Start:
    """Where a run begins."""

    model: Model
    preprocess: Preprocess
    config: Config  # with the model as it is built
    history: dict  # provenance of the weights it starts from
    new_head: bool
    old_head: LogisticModel | None = None  # for other classes, where there was one
    notes: tuple[Note, ...] = ()  # what was assumed in reading the weights


def make_start(config: Config, parts: DatasetSplits) -> Start:
    """The model at step 0, a function of configuration, data and `init` alone."""
    torch.manual_seed(config.seed)
    start = from_weights(config, parts) if config.init else from_scratch(config, parts)
    freeze(start.model, config)
    optimize_for_cpu(start.model)
    return start


def early_size(config: Config) -> Size | None:
    """What pictures measure in the first part of the run: whole patches, at least one. None: as in the rest."""
    model = config.model
    if config.progressive_resize.scale == 1 or config.progressive_resize.fraction == 0:
        return None
    if isinstance(model, ViTConfig) and not model.resizable:
        raise ConfigError("progressive_resize does not work with rotary positions, which are made for one image size.")
    unit = model.stride if isinstance(model, ViTConfig) else (1, 1)
    rows, columns = (
        max(1, round(n * config.progressive_resize.scale / u)) * u for n, u in zip(model.image_size, unit, strict=True)
    )
    return rows, columns


def from_scratch(config: Config, parts: DatasetSplits) -> Start:
    model_config = config.model.replace(num_classes=len(parts.train.labels))
    if config.image_size:
        model_config = model_config.replace(image_size=config.image_size)
    mode = {1: "L", 3: "RGB"}.get(model_config.in_channels)
    if mode is None:
        raise ConfigError(f"Pictures have 1 or 3 channels, not {model_config.in_channels} (model.in_channels).")
    size = model_config.image_size
    mean, std = channel_statistics(parts.train, mode, size)  # type: ignore[arg-type]
    photographs = config.augment.crop == "resized" and not isinstance(parts.train, ArraySource)
    preprocess = Preprocess(size, crop=PHOTO_CROP if photographs else 1.0, mean=mean, std=std)
    return Start(build_model(model_config), preprocess, config.replace(model=model_config), {}, new_head=False)


def from_weights(config: Config, parts: DatasetSplits) -> Start:
    """The weights of `init` with the head removed, unless it is for these very labels already."""
    assert config.init is not None
    checkpoint = read_checkpoint(config.init)
    labels, assumed = parts.train.labels, checkpoint.notes  # those of a new head and size come below, and are asked for
    keeps_head = checkpoint.labels == labels
    old_head = None if keeps_head else head_of(checkpoint)
    if not keeps_head:
        checkpoint = replace(checkpoint.adapted(num_classes=0), temperature=1.0)
        checkpoint = checkpoint.adapted(num_classes=len(labels))
    if config.image_size:
        checkpoint = checkpoint.adapted(image_size=config.image_size)
    checkpoint = regularised(checkpoint, config.model)
    if checkpoint.preprocess is None:
        raise ConfigError(f"{config.init} takes {checkpoint.config.in_channels} channels, which pictures do not have.")
    history = {"init": config.init, "of": checkpoint.provenance}
    config = config.replace(model=checkpoint.config)
    model = checkpoint.model().train()
    return Start(model, checkpoint.preprocess, config, history, not keeps_head, old_head, assumed)


def head_of(checkpoint: Checkpoint) -> LogisticModel | None:
    tensors = checkpoint.tensors
    if not checkpoint.config.num_classes or "head.bias" not in tensors:
        return None
    return LogisticModel(tensors["head.weight"].double().T, tensors["head.bias"].double())


def regularised(checkpoint: Checkpoint, wanted: ModelConfig) -> Checkpoint:
    """With the dropouts that the run asks for, which have no weights."""
    if not (isinstance(wanted, ViTConfig) and isinstance(checkpoint.config, ViTConfig)):
        return checkpoint
    return replace(
        checkpoint, config=checkpoint.config.replace(**{n: getattr(wanted, n) for n in REGULARIZATION_FIELDS})
    )


def freeze(model: Model, config: Config) -> None:
    if config.lora_rank:
        if not isinstance(model.config, ViTConfig):
            raise ConfigError("lora is for the attention of a ViT; this model has none.")
        add_lora(model, config.lora_rank)
    depth = len(getattr(model, "blocks", ()))
    frozen = [p for name, p in model.named_parameters() if stays(name, config.freeze, depth)]
    for parameter in frozen:
        parameter.requires_grad_(False)
    names = [n for n, _ in model.named_parameters()]
    known = (ALL_BUT_HEAD, FIRST_THIRD)  # a model without blocks has no first third of them
    if idle := [f for f in config.freeze if f not in known and not any(stays(n, (f,), depth) for n in names)]:
        there = sorted({n.split(".")[0] for n in names})
        raise ConfigError(f"freeze: no weight begins with {', '.join(idle)}. There are {', '.join(there)}.")
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("freeze: nothing is left to be trained.")


def learning(model: nn.Module) -> None:
    """Training mode, but for batch norms that are frozen: their statistics stay, as their weights do."""
    model.train()
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not any(p.requires_grad for p in module.parameters()):
            module.eval()


def stays(name: str, freeze: tuple[str, ...], depth: int) -> bool:
    """Whether a weight of a model with so many blocks is frozen."""
    if ALL_BUT_HEAD in freeze and not name.startswith("head"):
        return True
    if FIRST_THIRD in freeze and depth and layer_of(name, depth) <= depth // 3:
        return True
    return any(name == f or name.startswith(f"{f}.") for f in freeze)
