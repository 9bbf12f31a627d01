"""Lowest layer: files, process and machine, text. It does not import models, datasets or commands."""
