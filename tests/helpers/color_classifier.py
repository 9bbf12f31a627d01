"""A classifier whose predictions are known: the class is the strongest color channel."""

from pathlib import Path

import torch
from PIL import Image

from patchword.checkpoints import Checkpoint
from patchword.config import ViTConfig
from patchword.data.preprocess import HALF, Preprocess
from patchword.models import build_model

COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


def color_checkpoint(temperature: float = 1.0, depth: int = 0) -> Checkpoint:
    """A ViT that classifies by the mean color. Its blocks, if any, have zero weights."""
    config = ViTConfig(
        image_size=16, patch_size=8, embed_dim=4, depth=depth, num_heads=1, mlp_dim=4, num_classes=3, pos_embed="none",
        class_token=False, pooling="average", post_norm=True,
    )  # fmt: skip
    model = build_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(float(depth > 0 and "norm" in name and name.endswith("weight")))
        for channel in range(3):
            model.patch_embed.proj.weight[channel, channel * 64 : (channel + 1) * 64] = 1 / 64
            model.head.weight[channel, channel] = 3.0
    preprocess = Preprocess(size=(16, 16), mean=HALF, std=HALF)
    return Checkpoint(config, dict(model.state_dict()), preprocess, tuple(COLORS), temperature)


def write_color_folder(folder: Path) -> Path:
    """Class folders with 13 images of one color each, one of them in the wrong class, and one damaged file."""
    for name, color in COLORS.items():
        (folder / name).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (20 + i, 30), color).save(folder / name / f"{i}.png")
    Image.new("RGB", (9, 9), COLORS["blue"]).save(folder / "red/wrong.png")
    (folder / "green/broken.jpg").write_bytes(b"\xff\xd8\xff\xe0nothing")
    return folder
