"""Inference engines behind one interface, their capabilities on this machine, and export."""

from .engine import ENGINES, Engine, open_engine, torch_engine

__all__ = ["ENGINES", "Engine", "open_engine", "torch_engine"]
