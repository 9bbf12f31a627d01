"""Two traps of CLIP's image towers in timm: the projection that is stored as a head, and the kind of GELU.

timm stores the projection into the space of the texts as a head with a bias of zeros. And it has two entry points for
weights that were trained with quick GELU, such as OpenAI's: `vit_base_patch16_clip_quickgelu_224` computes it,
`vit_base_patch16_clip_224` computes exact GELU with the same weights. The tag of the weights tells which those are.
The tables were written from timm 1.0.31.
"""

import re

from ...errors import Note
from ..family import Fields, Source, require_fields

# Width of the projection of published weights, by the name of the architecture.
PROJECTIONS = (
    (r"vit_base_patch\d+_plus_clip_\d+", 640),
    (r"vit_(xsmall|medium|betwixt|base)_.*clip_.*|eva02_base_.*clip_.*|vit_pe_core_(tiny|small)_.*", 512),
    (r"vit_large_.*clip_.*|eva02_large_.*clip_.*", 768),
    (r"vit_(huge|giant)_.*clip_.*|eva_giant_.*clip_.*|eva02_enormous_.*clip_.*|vit_pe_core_(base|large)_.*", 1024),
    (r"vit_gigantic_.*clip_.*|vit_pe_core_gigantic_.*", 1280),
)
# Architectures with exact GELU and tags of weights that were trained with quick GELU.
QUICK_GELU_WEIGHTS = (
    (r"vit_\w+_clip_\d+", r"openai|metaclip_400m|metaclip_2pt5b|dfn5b"),
    (r"vit_base_patch32_clip_224", r"laion400m_e32"),
    (r"vit_large_patch14_clip_224", r"dfn2b"),
    (r"vit_huge_patch14_clip_224", r"metaclip2_worldwide"),
)


def has_projection(source: Source, architecture: str) -> tuple[bool, list[Note]]:
    """Return whether the head of an architecture is CLIP's projection, and a note if that is only likely.

    In published weights it has a known width. In a model of other sizes, a bias of zeros and no labels could also be
    those of a classifier that was not trained; then the caller may give the number of classes.
    """
    weight, bias = source.tensors.get("head.weight"), source.tensors.get("head.bias")
    width = next((width for pattern, width in PROJECTIONS if re.fullmatch(pattern, architecture)), None)
    if width is None or weight is None or bias is None or "label_names" in source.config:
        return False, []
    if bias.any() or not weight.any():
        return False, []
    arguments = source.config.get("model_args")
    if not (isinstance(arguments, dict) and "embed_dim" in arguments) and len(weight) != width:
        return False, []  # config.json or the tensors say another number of outputs than that of the projection
    if len(weight) != width and source.given.get("num_classes") == len(weight):
        return False, []
    number = len(weight)
    text = f"the head has {number} outputs, a bias of zeros and no labels, and is read as the projection of CLIP"
    if len(weight) != width:
        text += f"; if it is a classifier, give num_classes={number} (--num-classes {number})"
    return True, [Note(f"{text}.", "projection_assumed")]


def check_quick_gelu(source: Source, architecture: str, tag: str) -> list[Note]:
    """Note that weights were trained with quick GELU, but timm computes exact GELU with them.

    Raises:
        UnknownArchitectureError: Only the name of the file says so, and the caller did not give the activation.
    """
    if not trained_with_quick_gelu(source, architecture, tag) or "activation" in source.given:
        return []
    if "architecture" not in source.config:
        name = architecture.replace("_clip_", "_clip_quickgelu_")
        require_fields(
            source.given,
            ("activation",),
            f"By its name, these are weights of {architecture} with the tag {tag}, which were trained with quick GELU; "
            f"timm computes exact GELU with them unless the architecture is {name}. Put timm's config.json beside it.",
        )
    text = (
        f"timm computes exact GELU for {architecture}, and so does this model, but the weights were trained with quick "
        "GELU: unless they were fine-tuned in timm, give activation=quick_gelu (--activation quick_gelu) for the "
        "outputs of the original model."
    )
    return [Note(text, "trained_with_quick_gelu")]


def trained_with_quick_gelu(source: Source, architecture: str, tag: str) -> bool:
    """Whether the tag, or timm's notes in config.json, say that these weights are not for the exact GELU."""
    if not re.fullmatch(r"vit_\w+_clip_\d+", architecture) or "_quickgelu_" in architecture:
        return False
    stated: Fields = source.config.get("pretrained_cfg") or {}
    notes = stated.get("notes") if isinstance(stated, dict) else None
    if notes and "quickgelu" in str(notes).lower():
        return True
    return any(re.fullmatch(name, architecture) and re.fullmatch(tags, tag) for name, tags in QUICK_GELU_WEIGHTS)
