"""One file per checkpoint family."""
