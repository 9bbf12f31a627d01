"""One file per checkpoint family: a table of tensor names both ways."""
