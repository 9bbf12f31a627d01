"""See through a model: the paper's figures and honest explanations, arrays first.

Every function takes a model and normalised images and gives arrays; `drawing` makes figures of them.
"""

from .attention_distance import Reach, attention_reach
from .attention_rollout import head_attention, rollout
from .explain import METHODS, Method, explain, methods_for
from .faithfulness import Curves, deletion_insertion, randomisation
from .filters import Filters, embedding_filters
from .position_similarity import position_similarity
from .token_analysis import patch_colours, patch_similarity, patch_tokens, token_norms

__all__ = [
    "METHODS",
    "Curves",
    "Filters",
    "Method",
    "Reach",
    "attention_reach",
    "deletion_insertion",
    "embedding_filters",
    "explain",
    "head_attention",
    "methods_for",
    "patch_colours",
    "patch_similarity",
    "patch_tokens",
    "position_similarity",
    "randomisation",
    "rollout",
    "token_norms",
]
