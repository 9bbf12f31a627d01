"""Data set formats: image folders, CSV lists, Parquet, tar shards, arrays, Hugging Face data sets."""
