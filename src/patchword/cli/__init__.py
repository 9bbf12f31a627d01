"""The `patchword` command line: `main.py` parses, `commands/` has one file per command."""
