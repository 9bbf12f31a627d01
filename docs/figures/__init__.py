"""The images of README and documentation; docs/make_figures.py is the entry point."""
