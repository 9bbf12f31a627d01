"""The usual small ViT on CIFAR-10: 4x4 patches, 6 blocks of width 128, AdamW, flip and crop.

Command: patchword train benchmarks/recipes/usual_vit.py --budget 10m
"""

from patchword.config import AugmentConfig, Config, DataConfig, OptimConfig, ScheduleConfig, ViTConfig

config = Config(
    name="usual-vit",
    data=DataConfig(source="cifar10", val_fraction=0.04),
    model=ViTConfig(image_size=(32, 32), patch_size=(4, 4), embed_dim=128, depth=6, num_heads=4, mlp_dim=512),
    augment=AugmentConfig(crop="shift", flip=0.5),
    optim=OptimConfig(name="adamw", lr=1e-3, weight_decay=0.05),
    schedule=ScheduleConfig(shape="cosine", warmup_fraction=0.05),
    batch_size=128,
    budget=600,
    tta_flip=True,
)
