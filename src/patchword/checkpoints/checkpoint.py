"""The Checkpoint: tensors under our names, with everything that must be stored with them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig, ViTConfig
from ..data.preprocess import Preprocess
from ..errors import ConfigError, Note
from ..models import Model, adapt_config, adapt_state, build_model

MAX_HALF = torch.finfo(torch.float16).max
PREPROCESS_NOTES = {"preprocess_assumed", "preprocess_stated"}  # replaced when the caller gives the preprocessing


@dataclass(frozen=True)
class Checkpoint:
    """Weights with their architecture, preprocessing, labels and provenance.

    Attributes:
        config: The architecture.
        tensors: The state dict, with patchword's tensor names.
        preprocess: The evaluation transform; None if the inputs are not images (neither 1 nor 3 channels).
        labels: The class names, in the order of the class indices; None if they are not known.
        temperature: The number that logits are divided by (temperature scaling, Guo et al., 2017).
        provenance: How the model was trained, and its metrics.
        family: The format that the weights were read from, such as "timm".
        quirks: Details of that format that are needed to write the same file again.
        extras: Tensors of that format that are not used in inference.
        notes: What was assumed when the weights were read.
        multi_label: Whether an image can have more than one label; then probabilities are sigmoids, not a softmax.
    """

    config: ModelConfig
    tensors: dict[str, Tensor]
    preprocess: Preprocess | None
    labels: tuple[str, ...] | None = None
    temperature: float = 1.0
    provenance: dict[str, Any] = field(default_factory=dict)
    family: str = "patchword"
    quirks: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, Tensor] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    multi_label: bool = False

    def build_model(self) -> Model:
        """Build the model, in float32 and evaluation mode.

        It shares memory with those `tensors` that are float32.
        """
        with torch.device("meta"):
            model = build_model(self.config)
        buffers = {name for name, _ in model.named_buffers()} - set(model.state_dict())
        if buffers:  # sin-cos tables and masks are computed, so they cannot stay on the meta device
            model = build_model(self.config)
        state = {n: t.float() if t.is_floating_point() else t for n, t in self.tensors.items()}
        model.load_state_dict(state, assign=True)
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        return model.eval()

    def adapt(self, **changes: Any) -> "Checkpoint":
        """Return a copy with weights for another image size, number of channels or number of classes.

        Metrics are removed if the config changes, labels and temperature if the number of classes does.

        Args:
            **changes: Fields of the config, as in `adapt_model`.

        Raises:
            ConfigError: Another field was given; the weights cannot be adapted to it.
        """
        if not changes:
            return self
        config = adapt_config(self.config, **changes)
        tensors = adapt_state(self.tensors, self.config, config)
        preprocess, notes = self.preprocess, self.notes
        if config.in_channels != self.config.in_channels:
            preprocess = adapt_preprocess_channels(preprocess, config.in_channels)
        if preprocess is not None:
            trim = preprocess.trim if preprocess.size == config.image_size else (0, 0)
            preprocess = replace(preprocess, size=config.image_size, trim=trim)
        new_head = config.num_classes != self.config.num_classes
        if new_head and config.num_classes:
            text = f"the head was replaced by zeros for {config.num_classes} classes, so it must be trained."
            notes += (Note(text, "head_replaced"),)
        if getattr(self.config, "projection_dim", None) and not getattr(config, "projection_dim", None):
            text = "CLIP's projection was removed: the features are those before it."
            notes += (Note(text, "projection_removed"),)
        provenance = self.provenance
        if config != self.config:
            provenance = {name: value for name, value in provenance.items() if name != "metrics"}
        adapted = replace(
            self, config=config, tensors=tensors, preprocess=preprocess, notes=notes, provenance=provenance
        )
        return replace(adapted, labels=None, temperature=1.0, multi_label=False) if new_head else adapted

    def to_half(self) -> "Checkpoint":
        """Return a copy with float16 weights, which halves the file; `build_model` still returns a float32 model.

        Raises:
            ConfigError: A value exceeds the range of float16.
        """
        large = [n for n, t in self.tensors.items() if t.is_floating_point() and t.abs().max() > MAX_HALF]
        if large:
            raise ConfigError(f"{large[0]} has values beyond {MAX_HALF:g}, the maximum of half precision.")
        return replace(self, tensors={n: t.half() if t.is_floating_point() else t for n, t in self.tensors.items()})

    def with_metadata(self, labels: Sequence[str] | None = None, **preprocess: Any) -> "Checkpoint":
        """Return a copy with other labels or another preprocessing.

        Args:
            labels: The class names; None keeps those of the checkpoint.
            **preprocess: Fields of `Preprocess` to change, such as `mean` and `crop`.

        Raises:
            ConfigError: The number of labels is not the number of classes, or the model has no preprocessing.
        """
        result = self
        if labels is not None:
            if len(labels) != self.config.num_classes:
                raise ConfigError(f"{len(labels)} labels were given for a model of {self.config.num_classes} classes.")
            result = replace(result, labels=tuple(labels))
        if preprocess:
            if self.preprocess is None:
                raise ConfigError(f"A model of {self.config.in_channels} channels has no preprocessing to change.")
            changed = self.preprocess.replace(**preprocess)
            notes = tuple(note for note in self.notes if note.code not in PREPROCESS_NOTES)
            notes += (Note(f"images are preprocessed as given: {changed.summary()}.", "preprocess_stated"),)
            result = replace(result, preprocess=changed, notes=notes)
        return result


def adapt_preprocess_channels(preprocess: Preprocess | None, channels: int) -> Preprocess | None:
    """Average the normalization statistics for another number of channels; None if the inputs are not images."""
    if preprocess is None or channels not in (1, 3):
        return None
    mean, std = (sum(v) / len(v) for v in (preprocess.mean, preprocess.std))
    return replace(preprocess, mean=(mean,) * channels, std=(std,) * channels)


def move_prefix_positions(
    tensors: dict[str, Tensor], config: ViTConfig, num_positioned: int
) -> tuple[dict[str, Tensor], ViTConfig]:
    """Rewrite a model so that `num_positioned` prefix tokens have position embeddings; its outputs do not change.

    Position embeddings that are removed are added to their tokens; new ones are zero.
    """
    before = config.num_positioned
    if config.pos_embed != "learned" or num_positioned == before:
        return tensors, config
    tensors = dict(tensors)
    table = tensors["positions.table"]
    if num_positioned > before:
        zeros = table.new_zeros(1, num_positioned - before, table.shape[2])
        tensors["positions.table"] = torch.cat([table[:, :before], zeros, table[:, before:]], dim=1)
        return tensors, config.replace(pos_embed_prefix=num_positioned)
    names = [n for n in ("class_token", "distillation_token", "registers") if n in tensors]
    prefix = torch.cat([tensors[n] for n in names], dim=1)
    prefix[:, num_positioned:before] += table[:, num_positioned:before]
    lengths = [tensors[n].shape[1] for n in names]
    for name, tokens in zip(names, torch.split(prefix, lengths, dim=1), strict=True):
        tensors[name] = tokens.clone()
    tensors["positions.table"] = torch.cat([table[:, :num_positioned], table[:, before:]], dim=1)
    return tensors, config.replace(pos_embed_prefix=num_positioned)
