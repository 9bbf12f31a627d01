"""The commands that hand a model to others: card, push."""

from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional

from ...errors import ConfigError
from ..model_args import NO_OVERRIDES, Flag, ModelReference, ModelArgs, model_title, arg
from ..output import print_status


def card(
    model: ModelReference,
    reading: OmitArgPrefixes[ModelArgs] = NO_OVERRIDES,
    out: Annotated[Path | None, arg("FILE")] = None,
    overwrite: Flag = False,
) -> int:
    """Write a model card in the hub's form, from what the model records of itself.

    Example: patchword card runs/photos --out MODEL_CARD.md

    Args:
        out: file to write; without it the card goes to standard output
        overwrite: replace the file if it is there
    """
    from ...checkpoints.card import model_card
    from ...core.io import atomic_output

    title = model_title(model).removeprefix("patchword:")
    reference = model if model.startswith(("hf:", "patchword:")) else title
    text = model_card(reading.read(model), title, reference)
    if out is None:
        print(text, end="")
        return 0
    with atomic_output(out, overwrite=overwrite) as made:
        made.write_text(text, encoding="utf-8")
    print_status(f"wrote {out}")
    return 0


def push(
    model: ModelReference,
    to: Annotated[Positional[str], arg("hf:OWNER/NAME")],
    reading: OmitArgPrefixes[ModelArgs] = NO_OVERRIDES,
    private: Flag = False,
) -> int:
    """Send a model with its card to a Hugging Face hub; `hf:owner/name` reads it again anywhere.

    Example: patchword push runs/photos hf:me/my-photos --private

    HF_TOKEN says who you are; HF_ENDPOINT chooses another hub.

    Args:
        to: the repository, which is made if it is not there
        private: others do not see it
    """
    from ...checkpoints.push_to_hub import push_to_hub as send

    if not to.startswith("hf:"):
        raise ConfigError(f"{to} is no place on a hub. Write hf:owner/name.")
    print_status(f"sent to {send(reading.read(model), to, private=private)}")
    return 0
