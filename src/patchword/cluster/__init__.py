"""Large jobs on many machines: only this package imports Ray."""
