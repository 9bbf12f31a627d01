"""Training augmentation: crops, color, RandAugment, mixup."""
