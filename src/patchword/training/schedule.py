"""Learning rate schedules."""

import math

from ..config import ScheduleConfig


def lr_factor(config: ScheduleConfig, progress: float) -> float:
    """Return the learning rate as a fraction of its peak.

    Args:
        config: The schedule.
        progress: The completed fraction of the run: 0 at the first step, 1 after the last.
    """
    warmup = config.warmup_fraction
    if progress < warmup:
        return max(progress, 1e-3 * warmup) / warmup  # a first step with a learning rate of 0 would be wasted
    decay_progress = (progress - warmup) / max(1e-9, 1 - warmup)
    if config.shape == "cosine":
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, decay_progress)))
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine
    if config.shape == "linear":
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * max(0.0, 1 - decay_progress)
    if config.shape == "rsqrt":
        # Reciprocal square root with the warmup as time scale and a linear cooldown, as in big_vision.
        timescale = warmup or 0.01
        cooldown = min(1.0, (1 - progress) / config.cooldown_fraction) if config.cooldown_fraction else 1.0
        return math.sqrt(timescale / max(progress, timescale)) * max(0.0, cooldown)
    return 1.0
