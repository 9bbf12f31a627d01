"""Inspection of models: attention, explanations and their faithfulness, filters, position embeddings and tokens.

Functions take a model and normalized images, and return arrays; `patchword.plots` makes figures of them.
"""

from .attention_distance import AttentionDistance, measure_attention_distance
from .attention_rollout import head_attention, rollout
from .explain import METHODS, Method, explain, methods_for
from .faithfulness import FaithfulnessCurves, deletion_insertion, parameter_randomization
from .filters import Filters, embedding_filters
from .pos_embed_similarity import position_similarity
from .token_analysis import patch_colors, patch_similarity, patch_tokens, token_norms

__all__ = [
    "METHODS",
    "AttentionDistance",
    "FaithfulnessCurves",
    "Filters",
    "Method",
    "deletion_insertion",
    "embedding_filters",
    "explain",
    "head_attention",
    "measure_attention_distance",
    "methods_for",
    "parameter_randomization",
    "patch_colors",
    "patch_similarity",
    "patch_tokens",
    "position_similarity",
    "rollout",
    "token_norms",
]
