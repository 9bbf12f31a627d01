"""Trains a small ViT with a stem of one convolution on scikit-learn's handwritten digits in about a minute.

Command: patchword quickstart  (the same as: patchword train quickstart)
Machine: 1 core (AMD EPYC, AVX-512), 21 to 35 seconds.
Result: 97.8% accuracy on 359 digits, one seed (results/quickstart.json).
"""

from patchword.config import AugmentConfig, Config, DataConfig, OptimConfig, ViTConfig

config = Config(
    name="digits",
    data=DataConfig(source="digits"),
    model=ViTConfig(
        image_size=(8, 8), patch_size=(1, 1), in_channels=1, embed_dim=96, depth=4, num_heads=3, mlp_dim=192,
        stem="conv", stem_layers=(48,), class_token=False, pooling="average",
    ),
    augment=AugmentConfig(crop="resized", scale=(0.6, 1.0), ratio=(0.8, 1.25), cutout=0.25),
    optim=OptimConfig(name="muon", lr=3e-3, muon_lr=0.02, momentum=0.95, weight_decay=0.05),
    batch_size=64,
    num_threads=1,
    epochs=40,
    ema=0.98,
    eval_every=5,
)  # fmt: skip
