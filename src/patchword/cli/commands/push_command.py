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
    """Upload a model and its card to the Hugging Face Hub. The reference hf:OWNER/NAME then loads it anywhere.

    Example: patchword push runs/photos hf:me/my-photos --private

    Set the environment variable HF_TOKEN to your access token, and HF_ENDPOINT to use another hub.

    Args:
        to: repository on the hub, which is created if it does not exist
        private: create a private repository
    """
    from ...checkpoints.push import push_to_hub as push_checkpoint

    if not to.startswith("hf:"):
        raise ConfigError(f"{to} is not a repository on a hub. Write hf:owner/name.")
    print_stderr(f"pushed to {push_checkpoint(model_args.read(model), to, private=private)}")
    return 0
