"""`python -m patchword` is the command `patchword`."""

from .cli.main import main

main()
