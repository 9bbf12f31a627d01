"""A study of tiny runs on digits."""

from patchword.config import Config, DataConfig, OptimConfig, ViTConfig
from patchword.studies.study import Cell, Study

TINY = ViTConfig(
    image_size=(8, 8), patch_size=(2, 2), in_channels=1, embed_dim=32, depth=2, num_heads=2, mlp_dim=64,
    class_token=False, pooling="average",
)  # fmt: skip
BASE = Config(data=DataConfig(source="digits"), model=TINY, batch_size=64, optim=OptimConfig(lr=3e-3), eval_every=1e9)


def little_study() -> Study:
    cells = tuple(
        Cell("ViT", kind, BASE.replace(model=TINY.replace(pos_embed=kind)))
        for kind in ("none", "learned")
    )  # fmt: skip
    return Study("positions", "Do positions matter?", "Which?", "The paper.", "positions", cells, "steps")
