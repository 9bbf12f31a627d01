"""Trains DeiT-Ti/16 with hard distillation on ImageNet for 300 epochs, as published except for the teacher, a ViT-B/16.

Command: torchrun --nproc-per-node 8 -m patchword train deit --data.source imagenet
Machine: 8 GPUs; not run at this scale.
Result: not measured. Published: 74.5% top-1 (Touvron et al., 2021), with a teacher (RegNetY-16GF) that patchword lacks.
"""

from patchword.config import Config, DataConfig, DistillConfig, OptimConfig, ScheduleConfig
from patchword.config.presets import augmentation, preset

config = Config(
    name="deit",
    data=DataConfig(source="imagenet", num_workers=8, cache_gib=0),
    model=preset("Ti/16", distillation=True, drop_path=0.1),
    augment=augmentation("medium", scale=(0.08, 1.0), randaug_magnitude=9, mixup=0.8, cutmix=1.0, random_erasing=0.25),
    distill=DistillConfig(teacher="hf:timm/vit_base_patch16_224.augreg2_in21k_ft_in1k", kind="hard", weight=0.5),
    optim=OptimConfig(lr=1e-3, weight_decay=0.05, clip_grad_norm=0.0),
    schedule=ScheduleConfig(warmup_fraction=5 / 300, min_lr_ratio=0.01),
    batch_size=1024,
    epochs=300,
    ema=0.99996,
    label_smoothing=0.1,
)
