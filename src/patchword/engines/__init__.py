"""Where models run: engines behind one interface, what this machine can be trusted with, and export."""

from .engine import ENGINES, Engine, open_engine, torch_engine

__all__ = ["ENGINES", "Engine", "open_engine", "torch_engine"]
