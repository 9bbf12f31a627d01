"""Dataset formats: image folders, CSV lists, Parquet, tar shards, arrays, Hugging Face datasets."""
