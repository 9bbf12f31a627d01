"""`python -m patchword` is the command `patchword`."""

from .cli import main

main()
