"""The number format of training, chosen by what the hardware was measured to do."""

import contextlib
from typing import Any

import torch

from ..config.train import Precision
from ..engines.capabilities import probe_capabilities
from ..errors import ConfigError

MIN_BF16_SPEEDUP = 1.2  # `auto` uses bf16 only above this


def resolve_precision(precision: Precision, device: torch.device) -> Precision:
    """Return "fp32" or "bf16".

    Args:
        precision: With "auto", bf16 is chosen if it works and is faster.
        device: The device to train on.

    Raises:
        ConfigError: bf16 was asked for, and this processor cannot compute in it.
    """
    if precision == "fp32":
        return "fp32"
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    capabilities = probe_capabilities()
    if precision == "bf16" and not capabilities.bf16_works:
        raise ConfigError(
            "precision is bf16, but this processor cannot compute in it (a test in a subprocess crashed). Use fp32.",
            code="bf16_unsupported",
        )
    return "bf16" if precision == "bf16" or capabilities.bf16_speedup > MIN_BF16_SPEEDUP else "fp32"


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return torch's autocast for bf16; for fp32 a context that does nothing."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
