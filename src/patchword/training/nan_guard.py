"""NaN and Inf in a training step: the step is discarded, and its cause is saved so that it can be reproduced.

A fault directory RUN/faults/step-00000120 holds the model before the step, the batch, and fault.json, which names the
first tensor that was not finite. `replay` computes the step again and should find the same tensor. Nothing is pickled.
"""

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.model_dir import MODEL_JSON, WEIGHTS_FILE, model_json, read_model_dir
from ..checkpoints.tensor_files import write_tensors
from ..config.train import Precision
from ..core.io import atomic_output, read_json, sha256, tensor_bytes, write_json
from ..models import optimize_for_cpu
from .loss import Objective
from .precision import autocast

FAULT_FILE, BATCH_FILE = "fault.json", "batch.safetensors"
FORMER_NAMES = {"place": "location", "part": "micro_batch", "where": "stage", "taught": "teacher_logits"}


@dataclass(frozen=True)
class FaultLocation:
    """The first tensor that was not finite.

    Attributes:
        stage: "input", "forward", "loss" or "backward".
        layer: The input tensor, the module (its output) or the parameter (its gradient).
        sha256: The digest of the tensor.
    """

    stage: str
    layer: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.stage}, {self.layer}"


@dataclass(frozen=True)
class Fault:
    """A step that was discarded.

    Attributes:
        step: The number of steps before it.
        micro_batch: Which micro-batch of the step failed, with gradient accumulation.
        seed: The seed of the model's randomness (dropout) in that micro-batch.
        location: Where it went wrong; None if that could not be reproduced.
        samples: The names of the samples of the micro-batch.
        objective: The loss, as JSON.
        precision: The precision of the step.
    """

    step: int
    micro_batch: int
    seed: int
    location: FaultLocation | None
    samples: list[str]
    objective: dict[str, Any]
    precision: Precision = "fp32"


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or Inf."""
    return bool(torch.isfinite(tensor).all())


def tensor_digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


@contextmanager
def record_non_finite(model: nn.Module, locations: list[FaultLocation]) -> Iterator[None]:
    """Append to `locations` every leaf module whose output is not finite, in the order of computation."""

    def check(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and not is_finite(output):
            locations.append(FaultLocation("forward", name, tensor_digest(output)))

    leaves = [(n, m) for n, m in model.named_modules() if not list(m.children())]
    hooks = [m.register_forward_hook(partial(check, n)) for n, m in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def locate_fault(
    model: nn.Module, objective: Objective, batch: dict[str, Tensor], seed: int, precision: Precision = "fp32"
) -> FaultLocation | None:
    """Compute one micro-batch again, on a copy of the model, and find the first tensor that is not finite.

    Args:
        model: The model before the step.
        objective: The loss.
        batch: "images", "targets" and, with a teacher, "teacher_logits".
        seed: The seed of the model's randomness.
        precision: The precision of the step.
    """
    for name, tensor in batch.items():
        if tensor.is_floating_point() and not is_finite(tensor):
            return FaultLocation("input", name, tensor_digest(tensor))
    # Contiguous, as if read from a file: the last bits of a convolution depend on the memory layout.
    batch = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in batch.items()}
    locations: list[FaultLocation] = []
    model = optimize_for_cpu(copy.deepcopy(model)).train()  # a copy: the forward pass updates batch norm statistics
    torch.manual_seed(seed)
    with record_non_finite(model, locations), autocast(precision, batch["images"].device):
        loss, _ = objective(model, **batch)
    if locations:
        return locations[0]
    if not is_finite(loss):
        return FaultLocation("loss", "loss", tensor_digest(loss))
    loss.backward()
    gradients = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
    locations = [FaultLocation("backward", name, tensor_digest(g)) for name, g in gradients if not is_finite(g.norm())]
    return locations[-1] if locations else None  # the last in the model is the first in the backward pass


def write_fault(
    run_dir: Path, fault: Fault, model: Checkpoint, batch: dict[str, Tensor], class_weights: Tensor | None
) -> Path:
    """Write RUN/faults/step-..., completely or not at all; if the step failed before, the name gets a number."""
    folder = run_dir / "faults" / f"step-{fault.step:08d}"
    number = 1
    while folder.exists():
        number += 1
        folder = folder.with_name(f"step-{fault.step:08d}-{number}")
    with atomic_output(folder) as temporary:
        temporary.mkdir()
        write_tensors(temporary / WEIGHTS_FILE, model.tensors)
        write_json(temporary / MODEL_JSON, {**model_json(model), "sha256": sha256(temporary / WEIGHTS_FILE)})
        extra = {} if class_weights is None else {"weights": class_weights}
        write_tensors(temporary / BATCH_FILE, {**batch, **extra})
        write_json(temporary / FAULT_FILE, asdict(fault))
    return folder


def read_fault(folder: Path) -> Fault:
    """Read fault.json, also that of earlier versions."""
    document = with_current_names(read_json(folder / FAULT_FILE))
    location = document.pop("location")
    return Fault(**document, location=FaultLocation(**with_current_names(location)) if location else None)


def with_current_names(values: dict[str, Any]) -> dict[str, Any]:
    """Rename keys that earlier versions wrote."""
    return {FORMER_NAMES.get(name, name): value for name, value in values.items()}


def replay(folder: str | Path) -> tuple[Fault, FaultLocation | None]:
    """Return the recorded fault, and where the step goes wrong when it is computed again."""
    folder = Path(folder)
    fault = read_fault(folder)
    batch = with_current_names(load_file(folder / BATCH_FILE))
    objective = Objective.from_json(fault.objective, batch.pop("weights", None))
    model = read_model_dir(folder).build_model()
    return fault, locate_fault(model, objective, batch, fault.seed, fault.precision)
