"""A model behind HTTP: an API that holds under load, and a page to try it on."""

from .app import create_app
from .limits import Limits

__all__ = ["Limits", "create_app"]
