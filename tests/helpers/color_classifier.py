"""A classifier whose predictions are known: the class is the strongest color channel."""

import torch

from patchword.checkpoints import Checkpoint
from patchword.config import ViTConfig
from patchword.data.preprocess import HALF, Preprocess
from patchword.models import build_model

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


def colour_checkpoint(temperature: float = 1.0) -> Checkpoint:
    """A ViT without blocks that reads the mean colour: class k is the strongest channel."""
    config = ViTConfig(
        image_size=16, patch_size=8, embed_dim=4, depth=0, num_heads=1, mlp_dim=4, num_classes=3, pos_embed="none",
        class_token=False, pooling="average", post_norm=True,
    )  # fmt: skip
    model = build_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for channel in range(3):
            model.patch_embed.proj.weight[channel, channel * 64 : (channel + 1) * 64] = 1 / 64
            model.head.weight[channel, channel] = 3.0
    preprocess = Preprocess(size=(16, 16), mean=HALF, std=HALF)
    return Checkpoint(config, dict(model.state_dict()), preprocess, tuple(COLOURS), temperature)
