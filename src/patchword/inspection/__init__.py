"""See through a model: the paper's figures and honest explanations, arrays first.

Every function takes a model and normalised images and gives arrays; `drawing` makes figures of them.
"""

from .distance import Reach, attention_reach
from .explain import METHODS, Method, explain, methods_for
from .filters import Filters, embedding_filters
from .looking import head_attention, rollout
from .overlay import on_picture, overlay
from .positions import position_similarity
from .tokens import patch_colours, patch_similarity, patch_tokens, token_norms
from .trust import Curves, deletion_insertion, randomisation

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
    "on_picture",
    "overlay",
    "patch_colours",
    "patch_similarity",
    "patch_tokens",
    "position_similarity",
    "randomisation",
    "rollout",
    "token_norms",
]
