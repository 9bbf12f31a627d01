"""Datasets: from files on disk to batches of images and labels. Does not know models."""
