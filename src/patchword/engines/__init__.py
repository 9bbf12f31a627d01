"""Where models run fast; so far, what this machine can be trusted with (probe.py)."""
