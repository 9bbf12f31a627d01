"""From images to predictions and embeddings: the one path that all commands use."""
