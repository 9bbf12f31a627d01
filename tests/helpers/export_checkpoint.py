"""A small checkpoint whose predictions differ between images, for exports and engines."""

import torch

from helpers.model_zoo import random_model
from patchword.checkpoints import Checkpoint
from patchword.config import ViTConfig
from patchword.data.preprocess import HALF, Preprocess
from patchword.engines.exportable import ExportableModel
from patchword.engines.parity import sample_images

TINY = ViTConfig(image_size=(32, 32), patch_size=(8, 8), embed_dim=48, depth=2, num_heads=3, mlp_dim=96, num_classes=5)
LABELS = ("cat", "dog", "eft", "fox", "gnu")


def make_checkpoint(config: ViTConfig) -> Checkpoint:
    """A model with random weights, five classes and a temperature."""
    channels = config.in_channels
    preprocess = Preprocess(config.image_size, crop=0.9, mean=HALF[:channels], std=HALF[:channels])
    tensors = dict(random_model(config).state_dict())
    checkpoint = Checkpoint(config, tensors, preprocess, labels=LABELS, temperature=1.3)
    with torch.no_grad():  # so that predictions differ between images
        tensors["head.bias"] -= 1.3 * ExportableModel(checkpoint)(sample_images(preprocess)).mean(dim=0)
    return checkpoint
