"""Evaluation of models: metrics with intervals, robustness, probes of frozen features, checks of exported files."""
