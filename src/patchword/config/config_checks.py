"""Checks of a valid config for settings that are likely mistakes."""

from ..core.findings import Finding, sort_by_severity
from ..errors import Note
from .model import ViTConfig
from .train import Config

MIN_PATCHES, FEW_PATCHES = 2, 4  # along a side: fewer is an error, or a warning
MIN_HEAD_DIM = 16  # published models have 64; small ones for small images have 20 or more
MAX_LR = {"adamw": 1e-2, "muon": 1e-2, "sgd": 1.0}  # from scratch
MAX_FINETUNE_LR = {"adamw": 3e-4, "muon": 3e-4, "sgd": 0.1}  # higher rates destroy pretrained weights
LAYER_DECAY_FACTOR = 10  # layer_decay lowers the rate of most layers, so that the peak may be this much higher
MIN_LR = {"adamw": 1e-6, "muon": 1e-6, "sgd": 1e-5}


def examine_config(config: Config) -> list[Finding]:
    """Returns what can be found before any image is read, most severe first."""
    findings = learning_rate_findings(config)
    if isinstance(config.model, ViTConfig):
        findings += patch_findings(config.model.image_size, config.model.stride) + head_dim_findings(config.model)
    return sort_by_severity(findings)


def config_notes(config: Config) -> list[Note]:
    """Returns the findings as notes of a run. `config` is resolved: its model is the one that is trained."""
    return [Note(f"{finding.message} {finding.advice}", "odd_setting") for finding in examine_config(config)]


def patch_findings(image_size: tuple[int, int], patch_size: tuple[int, int]) -> list[Finding]:
    """Checks that an image gives enough patches for attention."""
    if any(size % patch for size, patch in zip(image_size, patch_size, strict=True)):
        message = f"Images of {_format_size(image_size)} are not divisible into patches of {_format_size(patch_size)}."
        return [
            Finding(
                "error",
                "indivisible_image_size",
                message,
                (),
                "Set model.image_size to a multiple of model.patch_size.",
            )
        ]
    rows, columns = (size // patch for size, patch in zip(image_size, patch_size, strict=True))
    if min(rows, columns) >= FEW_PATCHES:
        return []
    message = f"Images of {_format_size(image_size)} with patches of {_format_size(patch_size)} pixels give only "
    message += f"{rows} x {columns} patches."
    advice = "Attention needs patches to relate: set a smaller model.patch_size or a larger model.image_size."
    return [Finding("error" if min(rows, columns) < MIN_PATCHES else "warning", "few_patches", message, (), advice)]


def _format_size(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def head_dim_findings(model: ViTConfig) -> list[Finding]:
    """Checks that attention heads are wide enough to tell patches apart."""
    if model.attention_dim >= MIN_HEAD_DIM:
        return []
    message = f"The width of an attention head is {model.attention_dim}; in the paper's models it is 64."
    num_heads = max(1, model.embed_dim // 32)
    advice = f"Narrow heads tell patches apart badly. Set model.num_heads to {num_heads}, or model.head_dim to 32."
    return [Finding("warning", "narrow_heads", message, (), advice)]


def learning_rate_findings(config: Config) -> list[Finding]:
    """Checks the learning rate, whose maximum is lower for pretrained weights than for new ones (LoRA, a new head)."""
    optim, pretrained = config.optim, config.init is not None
    trains_only_new = config.lora_rank > 0 or "all-but-head" in config.freeze
    highest = MAX_LR[optim.name]
    if pretrained and not trains_only_new:
        highest = min(highest, MAX_FINETUNE_LR[optim.name] * (LAYER_DECAY_FACTOR if optim.layer_decay < 1 else 1))
    kind = "pretrained" if pretrained else "new"
    message = f"The learning rate {optim.lr:g} is {{}} for {kind} weights with {optim.name}."
    if optim.lr > highest:
        harm = "The weights may be destroyed in the first steps." if pretrained else "Training may diverge."
        advice = f"{harm} Set optim.lr to {highest:g} or less."
        return [Finding("warning", "high_learning_rate", message.format("high"), (), advice)]
    if optim.lr < MIN_LR[optim.name]:
        advice = f"The weights will hardly change. Set optim.lr to {MIN_LR[optim.name]:g} or more."
        return [Finding("warning", "low_learning_rate", message.format("low"), (), advice)]
    return []
