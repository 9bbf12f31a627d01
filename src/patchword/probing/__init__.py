"""How good the features of a frozen model are: few-shot, nearest neighbours, logistic regression."""

from .measure import Probed, probe

__all__ = ["Probed", "probe"]
