"""`patchword help`: list the commands, or show the options of one."""

from typing import Annotated

from ..arguments import positional


def show_help(command: Annotated[str | None, positional("[COMMAND]")] = None) -> int:
    """List the commands, or show the options of one.

    Example: patchword help train

    Args:
        command: a command, e.g. train; by default, all commands are listed
    """
    from ..main import print_help

    return print_help([command] if command else [])
