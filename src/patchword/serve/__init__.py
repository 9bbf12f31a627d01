"""A model behind HTTP: an API with batching and load limits, and a page to try it in the browser."""

from .app import create_app
from .limits import Limits

__all__ = ["Limits", "create_app"]
