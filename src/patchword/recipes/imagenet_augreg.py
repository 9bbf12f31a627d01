"""Trains ViT-S/16 on ImageNet-1k from scratch for 90 epochs, as in "Better plain ViT baselines" and AugReg.

Command: torchrun --nproc-per-node 8 -m patchword train imagenet_augreg --data.source imagenet
Machine: 8 GPUs; not run at this scale.
Result: not measured. Published: 76.5% top-1 (Beyer et al., 2022).

For more machines, index tar shards once with `patchword index s3://bucket/imagenet`, give that URL as --data.source,
and start torchrun on every machine. Each step has the same images on any number of processes.
"""

from patchword.config import Config, DataConfig, OptimConfig, ScheduleConfig
from patchword.config.presets import augmentation, preset

config = Config(
    name="imagenet-augreg",
    data=DataConfig(source="imagenet", val_fraction=0.01, num_workers=8, cache_gib=0),
    model=preset("S/16", pos_embed="sincos", class_token=False, pooling="average"),
    augment=augmentation("light", randaug_magnitude=10, mixup=0.2),
    optim=OptimConfig(lr=1e-3, weight_decay=0.1, clip_grad_norm=1.0),
    schedule=ScheduleConfig(warmup_fraction=10_000 / 112_590),
    batch_size=1024,
    epochs=90,
)
