"""Figures: arrays in, matplotlib figures out."""
