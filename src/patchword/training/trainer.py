"""A run between two steps, and how a step is made. Knows nothing of time, files or the user."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ..checkpoints.checkpoint import Checkpoint
from ..config import Config
from ..data.keyed_rng import keys
from ..data.loader import Batch, Loader
from ..data.sampler import BalancedSampler, ShuffledSampler
from ..data.sources import DatasetSplits
from ..errors import ConfigError, Note
from .cpu_data_parallel import Shares, share_count
from .distributed import ProcessGroup
from .ema import Average
from .head_probe import probe_head
from .init_model import early_size, learning, make_start
from .lora import merged_state
from .nan_guard import Fault, Place, diagnose
from .objective import Teacher, make_objective
from .optimizers import Sharpness, make_optimisers, set_rate
from .precision import autocast
from .schedule import rate

PROBE_SHARE = 0.2  # of a budget, at most, goes to the features that a new head is learnt from


class NotANumber(Exception):
    """A loss or a gradient is not finite: the step has not been made."""


class Trainer:
    """Model, average, optimisers and data; `step` counts the steps that have been made."""

    def __init__(self, config: Config, parts: DatasetSplits, world: ProcessGroup, *, fresh: bool) -> None:
        start = make_start(config, parts)
        self.config, self.preprocess, self.history, self.world = start.config, start.preprocess, start.history, world
        self.labels, self.multi_label = parts.train.labels, parts.train.multi_label
        check_batch(self.config, world)
        data = config.data
        plain: dict[str, Any] = {"workers": data.num_workers, "memory": data.cache_gib / 4}
        order = (
            BalancedSampler(config.seed, parts.train.targets)
            if data.balanced_sampling
            else ShuffledSampler(config.seed, len(parts.train))
        )
        half = {**plain, "memory": data.cache_gib / 2}  # and a quarter each for validation and test
        self.loader = Loader(parts.train, self.preprocess, order=order, augment=config.augment, **half)
        assert parts.val is not None
        self.val = Loader(parts.val, self.preprocess, **plain)
        self.test = Loader(parts.test, self.preprocess, **plain) if parts.test is not None else None
        self.notes: list[Note] = [*start.notes, *parts.notes]
        self.model = start.model
        self.inference_seconds = 0.0  # for a picture, once it is known
        if fresh and start.new_head and config.head_init == "probe":
            seconds = PROBE_SHARE * config.budget if config.budget else math.inf
            loader = Loader(parts.train, self.preprocess, workers=data.num_workers)
            note, self.inference_seconds = probe_head(
                self.model, start.old_head, loader, self.val, seconds, config.precision
            )
            self.notes.append(note)
        learning(self.model.to(world.device))
        world.share_state(self.model)  # features for a new head are limited by time: each process fits its own
        self.objective = make_objective(self.config, parts.train.targets, len(self.labels)).to(world.device)
        taught = config.distill.teacher is not None
        self.teacher = Teacher(config.distill, self.labels, self.preprocess).to(world.device) if taught else None
        shares = share_count(self.config, self.model, world)
        self.shares = Shares(self.model, self.objective, shares, self.config.precision) if shares > 1 else None
        self.optimisers: list[Optimizer] = make_optimisers(self.model, config.optim, self.config.precision)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.sharpness = Sharpness(self.parameters, config.optim.sam_rho) if config.optim.sam_rho else None
        init_weight = 1 - config.wise_ft_alpha
        self.average = Average(self.model, config.ema, init_weight) if config.ema or init_weight else None
        self.early, self.early_size = False, early_size(self.config)
        self.step, self.batches = 0, self.loader.training(())

    @property
    def evaluated(self) -> nn.Module:
        """What is evaluated and shipped."""
        return self.average.model if self.average else self.model

    @property
    def epoch(self) -> float:
        return self.step * self.config.batch_size / len(self.loader.source)

    def begin(self) -> None:
        """Starts to prepare batches, from the present step on."""
        self.batches = self.loader.training(self.stretches(self.step))

    def close(self) -> None:
        """Ends the threads that prepare batches and compute shares."""
        self.batches.close()
        if self.shares is not None:
            self.shares.pool.shutdown()

    def stretches(self, step: int) -> Iterator[tuple[int, int]]:
        """This process's stretch of positions in each part of each step, for ever."""
        size = self.config.batch_size // self.config.grad_accum_steps // self.world.size
        for number in itertools.count(step * self.config.grad_accum_steps):
            start = (number * self.world.size + self.world.rank) * size
            yield start, start + size

    def advance(self, progress: float) -> dict[str, float | None]:
        """Makes one step: loss, accuracy, gradient norm and rate. Raises NotANumber before anything has changed."""
        batches = list(itertools.islice(self.batches, self.config.grad_accum_steps))
        self.early = progress < self.config.progressive_resize.fraction
        learning(self.model)  # an evaluation has left all of it in one mode
        buffers = [b.clone() for b in self.model.buffers()]
        loss, accuracy, norm = self.gradients(batches)
        if self.sharpness is not None and math.isfinite(norm):
            self.sharpness.climb(norm)
            self.clear()
            _, _, norm = self.gradients(batches)
            self.sharpness.descend()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.clear()
            for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(before)
            raise NotANumber(self.find_fault(batches))
        factor = rate(self.config.schedule, progress)
        self.apply(norm, factor)
        return {"loss": loss, "accuracy": accuracy, "grad_norm": norm, "lr": self.config.optim.lr * factor}

    def gradients(self, batches: list[Batch]) -> tuple[float, float | None, float]:
        """Loss, accuracy (None where labels are mixed or several) and the norm of the gradient of a whole batch."""
        losses: list[Tensor] = []
        hits: list[Tensor] = []
        for part, batch in enumerate(batches):
            inputs = self.inputs(batch)
            if self.shares is not None:
                loss, logits = self.shares.backward(inputs, 1 / len(batches))
                losses.append(loss)
                hits += self.hits(batch, logits)
                continue
            torch.manual_seed(self.part_seed(part))
            with autocast(self.config.precision, self.world.device):
                loss, logits = self.objective(self.model, inputs["images"], inputs["targets"], inputs.get("taught"))
            (loss / len(batches)).backward()
            losses.append(loss.detach().float())
            hits += self.hits(batch, logits)
        means = [torch.stack(losses).mean(), torch.stack(hits).mean() if hits else losses[0].new_zeros(())]
        loss, accuracy = self.world.mean(torch.stack(means)).tolist()
        self.world.average_gradients(self.parameters)
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]).item()
        return loss, accuracy if hits else None, norm

    def hits(self, batch: Batch, logits: Tensor) -> list[Tensor]:
        """The accuracy on a batch, or nothing where labels are mixed or several."""
        if batch.targets.ndim == 2:
            return []
        return [(logits.detach().argmax(1) == batch.targets.to(self.world.device)).float().mean()]

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        device = self.world.device
        found = {"images": batch.images.to(device), "targets": batch.targets.to(device)}
        if self.teacher is not None:  # which sees pictures whole, however small the student has them
            with autocast(self.config.precision, device):
                found["taught"] = self.teacher(found["images"]).float()
        if self.early and self.early_size:
            found["images"] = F.interpolate(found["images"], self.early_size, mode="bilinear", antialias=True)
        return found

    def part_seed(self, part: int) -> int:
        """For the randomness inside the model, which has no samples: dropout, drop path."""
        place = torch.tensor([part * self.world.size + self.world.rank]).numpy()
        return int(keys(self.config.seed, self.step, place)[0] >> 1)

    @torch.no_grad()
    def apply(self, norm: float, factor: float) -> None:
        clip = self.config.optim.clip_grad_norm
        if clip and norm > clip:
            torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], clip / norm)
        set_rate(self.optimisers, factor)
        for optimiser in self.optimisers:
            optimiser.step()
        self.clear()
        self.step += 1
        if self.average is not None:
            self.average.update(self.model, self.step)

    def clear(self) -> None:
        for p in self.parameters:
            p.grad = None

    def find_fault(self, batches: list[Batch]) -> tuple[Fault, dict[str, Tensor]]:
        """Where the step that could not be made went wrong, and the part of the batch that did it."""
        found: tuple[int, Place | None] = (0, None)
        model = self.checkpoint(raw=True).model().to(self.world.device)  # as `replay` will see it: all of it trainable
        for part, batch in enumerate(batches):
            seed, precision = self.part_seed(part), self.config.precision
            place = diagnose(model, self.objective, self.inputs(batch), seed, precision)
            if place is not None:
                found = (part, place)
                break
        part, place = found
        names = [self.loader.source.name(int(i)) for i in batches[part].indices]
        said = self.objective.to_json()
        fault = Fault(self.step, part, self.part_seed(part), place, names, said, self.config.precision)
        return fault, self.inputs(batches[part])

    def checkpoint(self, provenance: dict[str, Any] | None = None, *, raw: bool = False) -> Checkpoint:
        """The evaluated model (`raw`: the one that is trained) with all that travels with it."""
        tensors = {n: t.cpu() for n, t in merged_state(self.model if raw else self.evaluated).items()}
        return Checkpoint(
            self.config.model,
            tensors,
            self.preprocess,
            self.labels,
            provenance=provenance or {},
            multi_label=self.multi_label,
        )

    def state(self) -> dict[str, Tensor]:
        """Everything that training needs and `checkpoint` does not hold."""
        tensors = {f"optim.{n}.{slot}": t for n, slot, t in self.slots()}
        if self.average is not None or self.config.lora_rank:
            tensors |= {f"weights.{n}": t for n, t in self.model.state_dict().items()}
        if self.average is not None and self.config.lora_rank:
            tensors |= {f"average.{n}": t for n, t in self.average.model.state_dict().items()}
        if self.average is not None:
            tensors |= {f"start.{n}": t for n, t in self.average.start.items()}
        return tensors

    def slots(self) -> Iterator[tuple[str, str, Tensor]]:
        names: dict[Tensor, str] = {p: n for n, p in self.model.named_parameters()}
        for optimiser in self.optimisers:
            for parameter, slots in optimiser.state.items():
                for slot, value in slots.items():
                    if value is not None:
                        yield names[parameter], slot, torch.as_tensor(value)

    def restore(self, step: int, model: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        """The opposite of `checkpoint` and `state`, bit for bit."""

        def under(prefix: str) -> dict[str, Tensor]:
            return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}

        self.model.load_state_dict(under("weights.") or model)
        if self.average is not None:
            self.average.model.load_state_dict(under("average.") or model)
            for name, value in under("start.").items():  # a head that was probed is not in `init`
                self.average.start[name].copy_(value)
        owners = {p: o for o in self.optimisers for g in o.param_groups for p in g["params"]}
        parameters = dict(self.model.named_parameters())
        for name, value in under("optim.").items():
            name, _, slot = name.rpartition(".")
            parameter = parameters[name]
            owners[parameter].state[parameter][slot] = value.to(parameter.device)
        self.step = step


def check_batch(config: Config, world: ProcessGroup) -> None:
    """A batch must fall apart evenly, and pairs that are mixed must stay together."""
    share, rest = divmod(config.batch_size, config.grad_accum_steps * world.size)
    if rest:
        raise ConfigError(
            f"batch_size {config.batch_size} cannot be divided among {world.size} processes x accumulate "
            f"{config.grad_accum_steps}; take a multiple of {world.size * config.grad_accum_steps}."
        )
    if (
        (config.augment.mixup or config.augment.cutmix)
        and share % 2
        and (world.size > 1 or config.grad_accum_steps > 1)
    ):
        raise ConfigError(f"mixup and cutmix mix pairs, so each process needs an even number of pictures, not {share}.")
