"""patchword: Vision Transformers you can train on a laptop, see through, trust, and ship."""

__version__ = "0.1.0"
