"""Metrics on plain arrays: classification, multi-label, calibration, intervals. No models, no files."""
