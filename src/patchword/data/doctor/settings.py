"""A configuration examined: choices that are allowed, and that people regret."""

from ...config import Config, ViTConfig
from .finding import Finding, gravest_first

TOO_FEW, FEW = 2, 4  # patches along a side
NARROW = 32  # numbers in an attention head
GENTLE = {"adamw": 3e-4, "muon": 3e-4, "sgd": 0.1}  # highest rates that pretrained weights are known to survive


def examine_config(config: Config) -> list[Finding]:
    """What can be said before any picture is read, the gravest first."""
    findings = learning_rate(config)
    if isinstance(config.model, ViTConfig) and config.init is None:  # else the architecture comes with the weights
        findings += patch_findings(config.model.image_size, config.model.stride) + narrow_heads(config.model)
    return gravest_first(findings)


def patch_findings(image_size: tuple[int, int], patch_size: tuple[int, int]) -> list[Finding]:
    """Whether there are enough patches for attention to have something to relate."""
    if any(size % patch for size, patch in zip(image_size, patch_size, strict=True)):
        what = f"Pictures of {_size(image_size)} cannot be cut into patches of {_size(patch_size)} pixels."
        return [Finding("error", what, (), "Choose a model.image_size that is a multiple of model.patch_size.")]
    rows, columns = (size // patch for size, patch in zip(image_size, patch_size, strict=True))
    if min(rows, columns) >= FEW:
        return []
    what = f"Pictures of {_size(image_size)} with patches of {_size(patch_size)} give only {rows} x {columns} patches."
    advice = "Attention relates patches to each other: use a smaller model.patch_size or a larger model.image_size."
    return [Finding("error" if min(rows, columns) < TOO_FEW else "warning", what, (), advice)]


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def narrow_heads(model: ViTConfig) -> list[Finding]:
    if model.attention_dim >= NARROW:
        return []
    what = f"An attention head is {model.attention_dim} numbers wide; the paper's models have 64."
    fitting = max(1, model.embed_dim // NARROW)
    advice = f"Narrow heads tell patches apart badly. Set model.num_heads to {fitting}, or model.head_dim to {NARROW}."
    return [Finding("warning", what, (), advice)]


def learning_rate(config: Config) -> list[Finding]:
    """Pretrained weights are forgotten at rates that are right from scratch. New weights alone can take more."""
    optim, highest = config.optim, GENTLE[config.optim.name]
    only_new = config.lora > 0 or "all-but-head" in config.freeze
    if config.init is None or only_new or optim.lr <= highest:
        return []
    what = f"The learning rate {optim.lr:g} is high for pretrained weights with {optim.name}."
    advice = f"They may be forgotten in the first steps. Set optim.lr to {highest:g} or less."
    return [Finding("warning", what, (), advice)]
