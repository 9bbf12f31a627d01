"""Figures of the arrays: each function takes arrays and gives a matplotlib Figure, drawn in the theme in force."""
