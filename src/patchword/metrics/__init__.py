"""Metrics of classifiers with confidence intervals. Arrays in, numbers and rows out; no models, no files."""
