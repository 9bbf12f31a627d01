"""The thousand classes of ImageNet: WordNet id and names, in the order of the class index.

The table beside this file states facts of ILSVRC 2012 (which synsets, in order of their WordNet 3.0 ids) and of
WordNet 3.0 (their synonyms). It knows nothing of models; that a model with 1000 outputs means these is the caller's
assumption to make.
"""

from functools import cache
from importlib.resources import files


@cache
def imagenet_classes() -> tuple[tuple[str, str], ...]:
    """(WordNet id, comma-separated names) for each class index, as in ("n01440764", "tench, Tinca tinca")."""
    table = files("patchword.data.datasets").joinpath("imagenet_classes.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in table.splitlines()]
    return tuple((wnid, names) for wnid, names in rows)
