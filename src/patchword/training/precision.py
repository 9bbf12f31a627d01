"""The number format of a step, chosen by what the machine has been seen to do."""

import contextlib
from typing import Any

import torch

from ..config.train import Precision
from ..engines.capabilities import probe_capabilities
from ..errors import ConfigError

WORTHWHILE = 1.2  # a gain that outweighs the precision


def resolve_precision(precision: Precision, device: torch.device) -> Precision:
    """fp32 or bf16: bf16 only where it works and, unless it was asked for, is faster."""
    if precision == "fp32":
        return "fp32"
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    seen = probe_capabilities()
    if precision == "bf16" and not seen.bf16_works:
        raise ConfigError("precision bf16: this processor cannot compute in it (a trial did not survive). Use fp32.")
    return "bf16" if precision == "bf16" or seen.bf16_gain > WORTHWHILE else "fp32"


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
