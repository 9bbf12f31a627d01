"""A ViT of 4 blocks and width 64 on CIFAR-10, small enough for 16 runs on two cores in half an hour.

patchword study data-size --recipe benchmarks/recipes/narrow_vit.py --budget 30m
"""

from patchword.config import AugmentConfig, Config, DataConfig, OptimConfig, ScheduleConfig, ViTConfig

config = Config(
    name="narrow",
    data=DataConfig(source="cifar10", val_fraction=0.04),
    model=ViTConfig(
        image_size=(32, 32), patch_size=(4, 4), embed_dim=64, depth=4, num_heads=2, mlp_dim=128,
        class_token=False, pooling="average", pos_embed="sincos",
    ),
    augment=AugmentConfig(crop="shift", flip=0.5),
    optim=OptimConfig(name="muon", lr=2e-3, muon_lr=0.02, momentum=0.95, weight_decay=0.05),
    schedule=ScheduleConfig(shape="linear", warmup_fraction=0.05),
    batch_size=128,
)  # fmt: skip
