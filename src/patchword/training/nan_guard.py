"""What happens when a loss or a gradient is not a number: the step is not made, and its cause is kept.

A fault folder RUN/faults/step-00000120 holds the model before the step, the batch, and fault.json, which says where the
first bad number arose. `replay` computes the step again and must meet the same bad tensor. Nothing in it is pickled.
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
from ..checkpoints.model_dir import MODEL_JSON, WEIGHTS, model_json, read_model_dir
from ..checkpoints.tensor_files import write_tensors
from ..config.train import Precision
from ..core.io import atomic_output, read_json, sha256, tensor_bytes, write_json
from ..models import optimize_for_cpu
from .objective import Objective
from .precision import autocast

RECORD, BATCH = "fault.json", "batch.safetensors"


@dataclass(frozen=True)
class Place:
    """Where the first number arose that is none."""

    where: str  # "input", "forward", "loss" or "backward"
    layer: str  # what was not finite: part of the input, a module's output, or a weight's gradient
    sha256: str  # of that tensor


@dataclass(frozen=True)
class Fault:
    """A step that was not made."""

    step: int
    part: int  # of the batch, where it is computed in parts
    seed: int  # of the model's own randomness (dropout) in that part
    place: Place | None  # None: it did not happen again
    samples: list[str]
    objective: dict[str, Any]
    precision: Precision = "fp32"


def is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


@contextmanager
def watched(model: nn.Module, found: list[Place]) -> Iterator[None]:
    """Notes the modules whose output is not finite, in the order in which they compute."""

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and not is_finite(output):
            found.append(Place("forward", name, digest(output)))

    leaves = [(n, m) for n, m in model.named_modules() if not list(m.children())]
    hooks = [m.register_forward_hook(partial(look, n)) for n, m in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def diagnose(
    model: nn.Module, objective: Objective, batch: dict[str, Tensor], seed: int, precision: Precision = "fp32"
) -> Place | None:
    """Computes one part of a step again, on a copy of the model: where it first goes wrong, or None.

    `batch` has "images" and "targets" and, with a teacher, "taught".
    """
    for name, tensor in batch.items():
        if tensor.is_floating_point() and not is_finite(tensor):
            return Place("input", name, digest(tensor))
    # Laid out in memory as if read from a file: a convolution's last bits depend on that.
    batch = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in batch.items()}
    found: list[Place] = []
    model = optimize_for_cpu(copy.deepcopy(model)).train()  # a batch norm's statistics change in the forward pass
    torch.manual_seed(seed)
    with watched(model, found), autocast(precision, batch["images"].device):
        loss, _ = objective(model, **batch)
    if found:
        return found[0]
    if not is_finite(loss):
        return Place("loss", "loss", digest(loss))
    loss.backward()
    gradients = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
    bad = [Place("backward", name, digest(g)) for name, g in gradients if not is_finite(g.norm())]
    return bad[-1] if bad else None  # the last in the model is the first that the backward pass meets


def write_fault(run: Path, fault: Fault, model: Checkpoint, batch: dict[str, Tensor], weights: Tensor | None) -> Path:
    """RUN/faults/step-..., whole or not at all; the same fault once more gets a number."""
    folder = run / "faults" / f"step-{fault.step:08d}"
    number = 1
    while folder.exists():
        number += 1
        folder = folder.with_name(f"step-{fault.step:08d}-{number}")
    with atomic_output(folder) as made:
        made.mkdir()
        write_tensors(made / WEIGHTS, model.tensors)
        write_json(made / MODEL_JSON, {**model_json(model), "sha256": sha256(made / WEIGHTS)})
        write_tensors(made / BATCH, {**batch, **({} if weights is None else {"weights": weights})})
        write_json(made / RECORD, asdict(fault))
    return folder


def replay(folder: str | Path) -> tuple[Fault, Place | None]:
    """The recorded fault, and where the step goes wrong when it is computed again: the same place, if all is well."""
    folder = Path(folder)
    said = read_json(folder / RECORD)
    place = Place(**said.pop("place")) if said["place"] else None
    fault = Fault(**{**said, "place": place})
    batch = load_file(folder / BATCH)
    objective = Objective.from_json(fault.objective, batch.pop("weights", None))
    return fault, diagnose(read_model_dir(folder).model(), objective, batch, fault.seed, fault.precision)
