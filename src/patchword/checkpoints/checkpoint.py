"""A model at rest: its tensors under our names and all that must travel with them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig, ViTConfig
from ..data.preprocess import Preprocess
from ..errors import ConfigError, Note
from ..models import Model, adapt_config, adapt_state, build_model

HALF_LARGEST = torch.finfo(torch.float16).max
PREPROCESS_NOTES = {"preprocess_assumed", "preprocess_stated"}  # superseded when the caller states the preprocessing


@dataclass(frozen=True)
class Checkpoint:
    """Weights with their architecture, preprocessing, labels and history."""

    config: ModelConfig
    tensors: dict[str, Tensor]
    preprocess: Preprocess | None  # None: not pictures (neither 1 nor 3 channels)
    labels: tuple[str, ...] | None = None
    temperature: float = 1.0
    provenance: dict[str, Any] = field(default_factory=dict)
    family: str = "patchword"  # the format the weights came in ...
    quirks: dict[str, Any] = field(default_factory=dict)  # ... what is needed to write that format as it was ...
    extras: dict[str, Tensor] = field(default_factory=dict)  # ... and its tensors that play no part in inference
    notes: tuple[Note, ...] = ()  # what was assumed in reading
    multi_label: bool = False  # labels are several: each class is right or wrong by itself

    def build_model(self) -> Model:
        """The model in float32, for inference."""
        with torch.device("meta"):
            model = build_model(self.config)
        buffers = {name for name, _ in model.named_buffers()} - set(model.state_dict())
        if buffers:  # sin-cos tables, masks: computed, so they cannot stay on the meta device
            model = build_model(self.config)
        state = {n: t.float() if t.is_floating_point() else t for n, t in self.tensors.items()}
        model.load_state_dict(state, assign=True)
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        return model.eval()

    def adapt(self, **changes: Any) -> "Checkpoint":
        """The same weights for another image size, channel count or number of classes."""
        if not changes:
            return self
        config = adapt_config(self.config, **changes)
        tensors = adapt_state(self.tensors, self.config, config)
        labels = self.labels if config.num_classes == self.config.num_classes else None
        preprocess = self.preprocess
        if config.in_channels != self.config.in_channels:
            preprocess = with_channels(preprocess, config.in_channels)
        if preprocess is not None:
            preprocess = replace(preprocess, size=config.image_size)
        # What was measured and fitted was so of the model as it was.
        same = {n: v for n, v in self.provenance.items() if n != "metrics"}
        notes, new_head = self.notes, config.num_classes != self.config.num_classes
        if config.num_classes not in (0, self.config.num_classes):
            text = f"the head was replaced: {config.num_classes} classes, all zeros, so it must be trained."
            notes += (Note(text, "head_replaced"),)
        made = replace(self, config=config, tensors=tensors, labels=labels, preprocess=preprocess, notes=notes)
        made = replace(made, provenance=same if config != self.config else self.provenance)
        return replace(made, temperature=1.0, multi_label=False) if new_head else made

    def to_half(self) -> "Checkpoint":
        """With weights of two bytes each, for storing; `model` computes in float32 all the same."""
        large = [n for n, t in self.tensors.items() if t.is_floating_point() and t.abs().max() > HALF_LARGEST]
        if large:
            raise ConfigError(f"{large[0]} has values beyond {HALF_LARGEST:g}, which half precision cannot hold.")
        return replace(self, tensors={n: t.half() if t.is_floating_point() else t for n, t in self.tensors.items()})

    def with_metadata(self, labels: Sequence[str] | None = None, **preprocess: Any) -> "Checkpoint":
        """With labels or fields of the preprocessing as the caller states them, whatever the file says."""
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
            notes += (Note(f"images are preprocessed as stated: {changed.summary()}.", "preprocess_stated"),)
            result = replace(result, preprocess=changed, notes=notes)
        return result


def with_channels(preprocess: Preprocess | None, channels: int) -> Preprocess | None:
    """Statistics for another number of channels: grey from colour by the mean; others are no pictures."""
    if preprocess is None or channels not in (1, 3):
        return None
    mean, std = (sum(v) / len(v) for v in (preprocess.mean, preprocess.std))
    return replace(preprocess, mean=(mean,) * channels, std=(std,) * channels)


def place_positions(tensors: dict[str, Tensor], config: ViTConfig, wanted: int) -> tuple[dict[str, Tensor], ViTConfig]:
    """The same model with positions for `wanted` prefix tokens: surplus ones are added to their token, new are zero."""
    have = config.num_positioned
    if config.pos_embed != "learned" or wanted == have:
        return tensors, config
    tensors = dict(tensors)
    table = tensors["positions.table"]
    if wanted > have:
        zeros = table.new_zeros(1, wanted - have, table.shape[2])
        tensors["positions.table"] = torch.cat([table[:, :have], zeros, table[:, have:]], dim=1)
        return tensors, config.replace(pos_embed_prefix=wanted)
    names = [n for n in ("class_token", "distillation_token", "registers") if n in tensors]
    prefix = torch.cat([tensors[n] for n in names], dim=1)
    prefix[:, wanted:have] += table[:, wanted:have]
    for name, part in zip(names, prefix.split([tensors[n].shape[1] for n in names], dim=1), strict=True):
        tensors[name] = part.clone()
    tensors["positions.table"] = torch.cat([table[:, :wanted], table[:, have:]], dim=1)
    return tensors, config.replace(pos_embed_prefix=wanted)
