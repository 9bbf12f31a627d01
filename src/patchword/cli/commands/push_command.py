"""`patchword push`: upload a model to a Hugging Face hub."""

from typing import Annotated

from ...core.text import print_stderr
from ...errors import ConfigError
from ..arguments import positional
from ..model_args import NO_OVERRIDES, Flag, ModelArgs, ModelReference


def push(
    model: ModelReference,
    to: Annotated[str, positional("hf:OWNER/NAME")],
    model_args: ModelArgs = NO_OVERRIDES,
    private: Flag = False,
) -> int:
    """Upload a model and its card to a Hugging Face hub. Afterwards `hf:owner/name` loads it anywhere.

    Example: patchword push runs/photos hf:me/my-photos --private

    HF_TOKEN holds your access token; HF_ENDPOINT selects another hub.

    Args:
        to: the repository, which is created if it does not exist
        private: create a private repository
    """
    from ...checkpoints.push import push_to_hub as push_checkpoint

    if not to.startswith("hf:"):
        raise ConfigError(f"{to} is not a repository on a hub. Write hf:owner/name.")
    print_stderr(f"pushed to {push_checkpoint(model_args.read(model), to, private=private)}")
    return 0
