"""Figures that belong to no room alone: how they look, what goes with one, and how they become files."""
