"""`patchword card`: write a model card."""

from pathlib import Path
from typing import Annotated

from ...core.text import print_stderr
from ..arguments import arg
from ..model_args import NO_OVERRIDES, Flag, ModelArgs, ModelReference, model_title


def card(
    model: ModelReference,
    model_args: ModelArgs = NO_OVERRIDES,
    out: Annotated[Path | None, arg("FILE")] = None,
    overwrite: Flag = False,
) -> int:
    """Write a model card for the Hugging Face Hub, from the metadata of a model.

    Example: patchword card runs/photos --out MODEL_CARD.md

    patchword show prints the same metadata on the screen, with what was assumed.

    Args:
        out: file to write; by default, the card is printed
        overwrite: replace an existing file
    """
    from ...checkpoints.card import model_card
    from ...core.io import atomic_output

    title = model_title(model).removeprefix("patchword:")
    reference = model if model.startswith(("hf:", "patchword:")) else title
    text = model_card(model_args.read(model), title, reference)
    if out is None:
        print(text, end="")
        return 0
    with atomic_output(out, overwrite=overwrite) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print_stderr(f"wrote {out}")
    return 0
