"""Shell completion: a script for bash, zsh or fish that knows all commands and options.

The script lists words; it starts no process, so completion is instant.
"""

from collections.abc import Callable

from ..config import ViTConfig
from ..config.overrides import flag_of
from ..recipes import RECIPES, load_recipe
from .arguments import field_arguments
from .config_flags import run_flags
from .parser import options_of, takes_model_args

BASH = """\
_patchword() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    elif [[ "$word" == -* ]]; then
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    elif [ "$COMP_CWORD" -eq 2 ]; then
        case "${{COMP_WORDS[1]}}" in
            train) words="{recipes}" ;;
            help) words="{commands}" ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    [[ "$word" == -* || "$COMP_CWORD" -eq 1 ]] || COMPREPLY+=($(compgen -f -- "$word"))
}}
complete -o filenames -F _patchword patchword
"""


def completion_script(shell: str, commands: dict[str, Callable[..., int]]) -> str:
    """Return the script of a shell: bash, zsh or fish."""
    flags = {name: sorted(command_flags(name, command)) for name, command in commands.items()}
    if shell == "fish":
        return fish_script(flags)
    cases = "\n".join(f'            {name}) words="{" ".join(words)}" ;;' for name, words in flags.items())
    script = BASH.format(commands=" ".join(commands), cases=cases, recipes=" ".join(RECIPES))
    return "autoload -U +X bashcompinit && bashcompinit\n" + script if shell == "zsh" else script


def command_flags(name: str, command: Callable[..., int]) -> set[str]:
    """Return all flags of a command, config fields included."""
    flags = {"--help", "--help-all", *(option.label for option in options_of(command) if not option.is_positional)}
    if takes_model_args(command):
        flags |= {flag_of(field.name) for field in field_arguments(ViTConfig)}
    return flags | (set(run_flags(load_recipe("finetune"))) if name == "train" else set())


def fish_script(flags: dict[str, list[str]]) -> str:
    """Return the script for fish."""
    lines = [f"complete -c patchword -n __fish_use_subcommand -a '{' '.join(flags)}'"]
    lines += [f"complete -c patchword -n '__fish_seen_subcommand_from train' -a '{' '.join(RECIPES)}'"]
    for name, words in flags.items():
        seen = f"complete -c patchword -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{seen} -l {word.removeprefix('--')}" for word in words]
    return "\n".join(lines) + "\n"
