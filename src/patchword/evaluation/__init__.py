"""How good a model is: accuracy with intervals, robustness, probes of frozen features, checks of exported files."""
