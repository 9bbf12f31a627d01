"""Entry point of `python -m patchword`."""

from .cli.main import main

main()
