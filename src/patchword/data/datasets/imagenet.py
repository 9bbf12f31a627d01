"""The 1000 classes of ImageNet: WordNet id and names, in the order of the class indices.

The table beside this file lists the synsets of ILSVRC 2012, ordered by WordNet 3.0 id, and their synonyms. Whether a
model with 1000 outputs has these classes is for the caller to decide.
"""

from functools import cache
from importlib.resources import files


@cache
def imagenet_classes() -> tuple[tuple[str, str], ...]:
    """Return (WordNet id, comma-separated names) per class index, such as ("n01440764", "tench, Tinca tinca")."""
    table = files("patchword.data.datasets").joinpath("imagenet_classes.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in table.splitlines()]
    return tuple((wnid, names) for wnid, names in rows)
