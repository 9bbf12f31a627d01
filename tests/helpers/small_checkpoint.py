"""A checkpoint of a small ViT with labels, preprocessing, temperature and provenance."""

import torch
from torch import nn

from patchword.checkpoints import Checkpoint
from patchword.config import ViTConfig
from patchword.data.preprocess import HALF, Preprocess
from patchword.models import build_model

SMALL = ViTConfig(image_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, mlp_dim=96, num_classes=4)
LABELS = ("ant", "bee", "cat", "dog")


def make_checkpoint(labels: tuple[str, ...] | None = LABELS, **changes: object) -> Checkpoint:
    """Make a checkpoint with random weights; `changes` are fields of its config."""
    torch.manual_seed(0)
    config = SMALL.replace(**changes)
    model = build_model(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    preprocess = Preprocess(size=config.image_size, crop=0.9, mean=HALF, std=HALF) if config.in_channels == 3 else None
    return Checkpoint(config, dict(model.state_dict()), preprocess, labels, temperature=1.5, provenance={"seed": 0})
