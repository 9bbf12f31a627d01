"""The lowest layer: files, the machine and text. It knows nothing of models, data sets or commands."""
