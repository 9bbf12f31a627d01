"""A configuration examined: choices that are allowed, and that people regret."""

from ..core.findings import Finding, gravest_first
from ..errors import Note
from .model import ViTConfig
from .train import Config

TOO_FEW, FEW = 2, 4  # patches along a side
NARROW = 16  # numbers in an attention head; published models have 64, small ones for small images down to 20
GENTLE = {"adamw": 3e-4, "muon": 3e-4, "sgd": 0.1}  # highest rates that pretrained weights are known to survive
DECAYED = 10  # times as high where layer_decay lowers the rate of the lower layers
HIGHEST = {"adamw": 1e-2, "muon": 1e-2, "sgd": 1.0}  # from scratch
LOWEST = {"adamw": 1e-6, "muon": 1e-6, "sgd": 1e-5}


def examine_config(config: Config) -> list[Finding]:
    """What can be said before any image is read, the gravest first."""
    findings = learning_rate(config)
    if isinstance(config.model, ViTConfig):
        findings += patch_findings(config.model.image_size, config.model.stride) + narrow_heads(config.model)
    return gravest_first(findings)


def config_notes(config: Config) -> list[Note]:
    """The same as sentences, for the notes of a run. `config` is the resolved one, with the model that is trained."""
    return [Note(f"{finding.what} {finding.advice}", "odd_setting") for finding in examine_config(config)]


def patch_findings(image_size: tuple[int, int], patch_size: tuple[int, int]) -> list[Finding]:
    """Whether there are enough patches for attention to have something to relate."""
    if any(size % patch for size, patch in zip(image_size, patch_size, strict=True)):
        what = f"Images of {_size(image_size)} cannot be cut into patches of {_size(patch_size)} pixels."
        return [Finding("error", what, (), "Choose a model.image_size that is a multiple of model.patch_size.")]
    rows, columns = (size // patch for size, patch in zip(image_size, patch_size, strict=True))
    if min(rows, columns) >= FEW:
        return []
    what = f"Images of {_size(image_size)} with patches of {_size(patch_size)} give only {rows} x {columns} patches."
    advice = "Attention relates patches to each other: use a smaller model.patch_size or a larger model.image_size."
    return [Finding("error" if min(rows, columns) < TOO_FEW else "warning", what, (), advice)]


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def narrow_heads(model: ViTConfig) -> list[Finding]:
    if model.attention_dim >= NARROW:
        return []
    what = f"An attention head is {model.attention_dim} numbers wide; the paper's models have 64."
    fitting = max(1, model.embed_dim // 32)
    advice = f"Narrow heads tell patches apart badly. Set model.num_heads to {fitting}, or model.head_dim to 32."
    return [Finding("warning", what, (), advice)]


def learning_rate(config: Config) -> list[Finding]:
    """Rates far outside of what works. Pretrained weights survive less than new ones, which LoRA and a head are."""
    optim, pretrained = config.optim, config.init is not None
    only_new = config.lora_rank > 0 or "all-but-head" in config.freeze
    highest = HIGHEST[optim.name]
    if pretrained and not only_new:
        highest = min(highest, GENTLE[optim.name] * (DECAYED if optim.layer_decay < 1 else 1))
    kind = "pretrained" if pretrained else "new"
    what = f"The learning rate {optim.lr:g} is {{}} for {kind} weights with {optim.name}."
    if optim.lr > highest:
        harm = "They may be forgotten in the first steps." if pretrained else "Training may diverge."
        return [Finding("warning", what.format("high"), (), f"{harm} Set optim.lr to {highest:g} or less.")]
    if optim.lr < LOWEST[optim.name]:
        advice = f"They will hardly change. Set optim.lr to {LOWEST[optim.name]:g} or more."
        return [Finding("warning", what.format("low"), (), advice)]
    return []
