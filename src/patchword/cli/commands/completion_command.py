"""`patchword completion`: print a script for shell completion."""

from typing import Annotated, Literal

from ..arguments import positional


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], positional("SHELL")]) -> int:
    """Print a script that completes commands and options in your shell.

    Example: patchword completion bash > ~/.local/share/bash-completion/completions/patchword

    Args:
        shell: your shell, bash, zsh or fish; for zsh, add source <(patchword completion zsh) to ~/.zshrc
    """
    from ..main import COMMANDS
    from ..shell_completion import completion_script

    print(completion_script(shell, COMMANDS), end="")
    return 0
