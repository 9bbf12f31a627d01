"""The state of a run between two steps, and the training step. Knows nothing about time, files or the user."""

import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ..checkpoints.checkpoint import Checkpoint
from ..config import Config
from ..data.keyed_rng import keys
from ..data.lane_sampler import make_sampler
from ..data.loader import Batch, Loader
from ..data.sources import DatasetSplits
from ..errors import ConfigError, Note
from ..models.lora import merge_lora
from .cpu_data_parallel import CPUDataParallel, num_chunks
from .distributed import ProcessGroup
from .ema import ModelEma
from .head_probe import probe_head
from .init_model import InitialState, first_phase_size, make_initial_state, make_sharded_state, set_train_mode
from .loss import Teacher, make_objective
from .nan_guard import Fault, locate_fault
from .optimizers import SAM, make_optimizers, set_lr
from .precision import autocast
from .schedule import lr_factor

if TYPE_CHECKING:
    from .fsdp import Sharding  # takes a second to import, which only sharded runs spend

MAX_PROBE_FRACTION = 0.2  # of a time budget, for the features that a new head is fitted on


class NonFiniteStepError(Exception):
    """A loss or a gradient norm is NaN or Inf: the step was discarded.

    Attributes:
        fault: What went wrong, and where.
        batch: The micro-batch that caused it.
    """

    def __init__(self, fault: Fault, batch: dict[str, Tensor]) -> None:
        super().__init__(fault, batch)
        self.fault, self.batch = fault, batch


class Trainer:
    """Model, EMA, optimizers and data.

    Args:
        config: The configuration of the run.
        splits: The data; there must be a validation set.
        group: The processes of the run.
        fresh: Whether the run starts from step 0; otherwise `restore` follows, and no head is probed.
        now: The clock that limits the head probe.

    Attributes:
        step: The number of completed steps.
        seconds_per_image: How long a forward pass takes, if the head probe measured it; else 0.
    """

    def __init__(
        self,
        config: Config,
        splits: DatasetSplits,
        group: ProcessGroup,
        *,
        fresh: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        sharded = group.shards(config)
        initial = make_sharded_state(config, splits, group) if sharded else make_initial_state(config, splits)
        self.config, self.preprocess, self.group = initial.config, initial.preprocess, group
        self.model, self.init_provenance = initial.model, initial.provenance
        self.labels, self.multi_label = splits.train.labels, splits.train.multi_label
        check_batch_size(self.config, group)
        self.make_loaders(splits)
        self.notes: list[Note] = [*initial.notes, *splits.notes]
        self.seconds_per_image = 0.0
        if fresh and initial.has_new_head and config.head_init == "probe":
            self.probe_head(initial, splits, now)
        self.sharding = self.share_model()
        set_train_mode(self.model)
        self.make_optimization(splits)
        self.is_first_phase, self.first_phase_size = False, first_phase_size(self.config)
        self.step, self.batches = 0, self.loader.train_batches(())

    def make_loaders(self, splits: DatasetSplits) -> None:
        """Make the loaders; half of the cache is for training, a quarter each for validation and test."""
        data = self.config.data
        self.loader = Loader(
            splits.train,
            self.preprocess,
            sampler=make_sampler(splits.train, self.config),
            augment=self.config.augment,
            num_workers=data.num_workers,
            cache_gib=data.cache_gib / 2,
        )
        assert splits.val is not None
        options: dict[str, Any] = {"num_workers": data.num_workers, "cache_gib": data.cache_gib / 4}
        self.val = Loader(splits.val, self.preprocess, **options)
        self.test = Loader(splits.test, self.preprocess, **options) if splits.test is not None else None

    def probe_head(self, initial: InitialState, splits: DatasetSplits, now: Callable[[], float]) -> None:
        """Initialize the new head with a linear probe."""
        max_seconds = MAX_PROBE_FRACTION * self.config.budget if self.config.budget else math.inf
        loader = Loader(splits.train, self.preprocess, num_workers=self.config.data.num_workers)
        note, self.seconds_per_image = probe_head(
            self.model, initial.pretrained_head, loader, self.val, max_seconds, self.config.precision, now
        )
        self.notes.append(note)

    def share_model(self) -> "Sharding | None":
        """Shard the model or, with "ddp", give every process the main process's: each has probed its own head."""
        if not self.group.shards(self.config):
            self.group.broadcast_state(self.model.to(self.group.device))
            return None
        from .fsdp import Sharding

        sharding = Sharding(self.config, self.group)
        sharding.shard(self.model, trained=True)
        return sharding

    def make_optimization(self, splits: DatasetSplits) -> None:
        """Make the loss, the teacher, the optimizers and the EMA."""
        config, device = self.config, self.group.device
        self.objective = make_objective(config, splits.train.targets, len(self.labels)).to(device)
        has_teacher = config.distill.teacher is not None
        self.teacher = Teacher(config.distill, self.labels, self.preprocess).to(device) if has_teacher else None
        chunks = num_chunks(config, self.model, self.group)
        self.cpu_parallel = (
            CPUDataParallel(self.model, self.objective, chunks, config.precision) if chunks > 1 else None
        )
        self.optimizers: list[Optimizer] = make_optimizers(self.model, config.optim, config.precision)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.sam = SAM(self.parameters, config.optim.sam_rho) if config.optim.sam_rho else None
        init_weight = 1 - config.wise_ft_alpha
        copy_model = copy.deepcopy if self.sharding is None else self.sharding.copy
        self.ema = ModelEma(self.model, config.ema, init_weight, copy_model) if config.ema or init_weight else None

    @property
    def eval_model(self) -> nn.Module:
        """The model that is evaluated and published: the EMA, if there is one."""
        return self.ema.model if self.ema else self.model

    @property
    def micro_batch_size(self) -> int:
        """The number of images of a micro-batch, in total over all processes."""
        return self.config.batch_size // self.config.grad_accum_steps

    @property
    def epoch(self) -> float:
        """The number of passes over the training set so far."""
        return self.step * self.config.batch_size / len(self.loader.source)

    def start_loader(self) -> None:
        """Start to prepare batches, from the current step on."""
        self.batches = self.loader.train_batches(self.batch_ranges(self.step))

    def close(self) -> None:
        """Stop the threads that prepare batches and compute chunks."""
        self.batches.close()
        if self.cpu_parallel is not None:
            self.cpu_parallel.close()

    def batch_ranges(self, step: int) -> Iterator[tuple[int, int]]:
        """Yield this process's range of sampler positions for each micro-batch from `step` on, without end."""
        size = self.micro_batch_size
        start, stop = own_range(size, self.group, in_pairs=mixes_pairs(self.config))
        for number in itertools.count(step * self.config.grad_accum_steps):
            yield number * size + start, number * size + stop

    def train_step(self, progress: float) -> dict[str, float | None]:
        """Make one training step.

        Args:
            progress: The completed fraction of the run, which sets the learning rate and the image size.

        Returns:
            loss, accuracy (None for mixed or multi-label targets), grad_norm and lr.

        Raises:
            NonFiniteStepError: Loss or gradient norm is not finite; nothing has changed.
        """
        batches = list(itertools.islice(self.batches, self.config.grad_accum_steps))
        self.is_first_phase = progress < self.config.progressive_resize.fraction
        set_train_mode(self.model)  # an evaluation may have changed it
        buffers = [b.clone() for b in self.model.buffers()]
        loss, accuracy, grad_norm = self.compute_gradients(batches)
        if self.sam is not None and math.isfinite(grad_norm):
            self.sam.perturb(grad_norm)
            self.zero_grad()
            _, _, grad_norm = self.compute_gradients(batches)
            self.sam.restore()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self.zero_grad()
            for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(before)
            raise NonFiniteStepError(*self.find_fault(batches))
        factor = lr_factor(self.config.schedule, progress)
        self.update_weights(grad_norm, factor)
        return {"loss": loss, "accuracy": accuracy, "grad_norm": grad_norm, "lr": self.config.optim.lr * factor}

    def compute_gradients(self, batches: list[Batch]) -> tuple[float, float | None, float]:
        """Compute gradients over all micro-batches and processes; return loss, accuracy and gradient norm."""
        losses: list[Tensor] = []
        accuracies: list[Tensor] = []
        for number, batch in enumerate(batches):
            inputs = self.prepare_inputs(batch)
            weight = len(batch.indices) * self.group.size / self.micro_batch_size  # 1 if processes have equal shares
            if self.cpu_parallel is not None:
                loss, logits = self.cpu_parallel.backward(inputs, 1 / len(batches))
            else:
                torch.manual_seed(self.dropout_seed(number))
                with autocast(self.config.precision, self.group.device):
                    loss, logits = self.objective(self.model, **inputs)
                (loss * weight / len(batches)).backward()
                loss = loss.detach().float()
            losses.append(loss * weight)
            if batch.targets.ndim == 1:
                correct = logits.detach().argmax(1) == batch.targets.to(self.group.device)
                accuracies.append(correct.float().mean() * weight)
        means = [torch.stack(losses).mean(), torch.stack(accuracies).mean() if accuracies else losses[0].new_zeros(())]
        mean_loss, accuracy = self.group.all_reduce_mean(torch.stack(means)).tolist()
        if self.sharding is None:
            self.group.average_gradients(self.parameters)
        grad_norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        grad_norm = grad_norm if self.sharding is None else self.sharding.gather(grad_norm)
        return mean_loss, accuracy if accuracies else None, grad_norm.item()

    def prepare_inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return images, targets and the teacher's logits. The teacher always sees full-size images."""
        device = self.group.device
        inputs = {"images": batch.images.to(device), "targets": batch.targets.to(device)}
        if self.teacher is not None:
            with autocast(self.config.precision, device):
                inputs["teacher_logits"] = self.teacher(inputs["images"]).float()
        if self.is_first_phase and self.first_phase_size:
            inputs["images"] = F.interpolate(inputs["images"], self.first_phase_size, mode="bilinear", antialias=True)
        return inputs

    def dropout_seed(self, micro_batch: int) -> int:
        """Return the seed for randomness inside the model (dropout, drop path) in a micro-batch of this step."""
        position = torch.tensor([micro_batch * self.group.size + self.group.rank]).numpy()
        return int(keys(self.config.seed, self.step, position)[0] >> 1)

    @torch.no_grad()
    def update_weights(self, grad_norm: float, factor: float) -> None:
        """Clip the gradients, and update weights and EMA."""
        limit = self.config.optim.clip_grad_norm
        if limit and grad_norm > limit:
            torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], limit / grad_norm)
        set_lr(self.optimizers, factor)
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero_grad()
        self.step += 1
        if self.ema is not None:
            self.ema.update(self.model, self.step)

    def zero_grad(self) -> None:
        """Remove all gradients."""
        for p in self.parameters:
            p.grad = None

    def find_fault(self, batches: list[Batch]) -> tuple[Fault, dict[str, Tensor]]:
        """Find out which micro-batch of the discarded step failed, and where."""
        whole = self.checkpoint(raw=True, everywhere=True)
        model = whole.build_model().to(self.group.device)  # fully trainable, as `replay` builds it
        failed, location = 0, None
        for number, batch in enumerate(batches):
            inputs = self.prepare_inputs(batch)
            location = locate_fault(model, self.objective, inputs, self.dropout_seed(number), self.config.precision)
            if location is not None:
                failed = number
                break
        samples = [self.loader.source.name(int(i)) for i in batches[failed].indices]
        objective, precision = self.objective.to_json(), self.config.precision
        fault = Fault(self.step, failed, self.dropout_seed(failed), location, samples, objective, precision)
        return fault, self.prepare_inputs(batches[failed])

    def checkpoint(
        self, provenance: dict[str, Any] | None = None, *, raw: bool = False, everywhere: bool = False
    ) -> Checkpoint:
        """Return the evaluated model with its preprocessing, labels and provenance.

        Args:
            provenance: Where the weights come from.
            raw: Return the trained model instead.
            everywhere: Of a sharded model, give the tensors to all processes, not only to the main process.
        """
        state = (self.model if raw else self.eval_model).state_dict()
        if self.sharding is not None:
            state = self.sharding.gather_state(state, keep=everywhere or self.group.is_main)
        return self.describe(provenance, {n: t.cpu() for n, t in merge_lora(state).items()})

    def describe(self, provenance: dict[str, Any] | None, tensors: dict[str, Tensor]) -> Checkpoint:
        """Return a checkpoint of these tensors with the run's preprocessing and labels."""
        return Checkpoint(
            self.config.model,
            tensors,
            self.preprocess,
            self.labels,
            provenance=provenance or {},
            multi_label=self.multi_label,
        )

    def state_tensors(self) -> dict[str, Tensor]:
        """Return everything that training needs and `checkpoint` does not hold."""
        tensors = {f"optim.{n}.{slot}": t for n, slot, t in self.optimizer_slots()}
        if self.ema is not None or self.config.lora_rank:
            tensors |= {f"weights.{n}": t for n, t in self.model.state_dict().items()}
        if self.ema is not None and self.config.lora_rank:
            tensors |= {f"average.{n}": t for n, t in self.ema.model.state_dict().items()}
        if self.ema is not None:
            tensors |= {f"start.{n}": t for n, t in self.ema.initial.items()}
        return tensors

    def sharded_tensors(self) -> dict[str, Tensor]:
        """Return everything that training needs, as sharded tensors: the content of a sharded checkpoint."""
        tensors = {f"optim.{n}.{slot}": t for n, slot, t in self.optimizer_slots()}
        tensors |= {f"weights.{n}": t for n, t in self.model.state_dict().items()}
        if self.ema is not None:
            tensors |= {f"average.{n}": t for n, t in self.ema.model.state_dict().items()}
            tensors |= {f"start.{n}": t for n, t in self.ema.initial.items()}
        return dict(sorted(tensors.items()))  # a resumed optimizer has its state in another order

    def optimizer_slots(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield parameter name, slot name ("exp_avg", ...) and value of the optimizers' state."""
        names: dict[Tensor, str] = {p: n for n, p in self.model.named_parameters()}
        for optimizer in self.optimizers:
            for parameter, slots in optimizer.state.items():
                for slot, value in slots.items():
                    if value is not None:
                        yield names[parameter], slot, torch.as_tensor(value)

    def restore(self, step: int, model: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        """Restore the state at `step`, bit for bit.

        Args:
            step: The number of completed steps.
            model: The tensors of `checkpoint`.
            state: The tensors of `state_tensors`.
        """

        def with_prefix(prefix: str) -> dict[str, Tensor]:
            return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}

        self.load_tensors(self.model.state_dict(), with_prefix("weights.") or model)
        if self.ema is not None:
            self.load_tensors(self.ema.model.state_dict(), with_prefix("average.") or model)
            start = with_prefix("start.")  # the weights of `init` do not hold a probed head
            self.load_tensors({name: self.ema.initial[name] for name in start}, start)
        for key, value in with_prefix("optim.").items():
            parameter, slots, slot = self.optimizer_slot(key)
            value = value.to(parameter.device)
            slots[slot] = value if self.sharding is None else self.sharding.shard_like(parameter, value)
        self.step = step

    @torch.no_grad()
    def load_tensors(self, targets: dict[str, Tensor], values: dict[str, Tensor]) -> None:
        """Copy whole tensors, which every process has read, into those of this process, sharded or not."""
        assert targets.keys() == values.keys()
        for name, target in targets.items():
            assert target.shape == values[name].shape, name
            value = values[name].to(target.device)
            target.copy_(value if self.sharding is None else self.sharding.shard_like(target, value))

    def restore_shards(self, step: int, folder: Path) -> None:
        """Restore the state at `step` from a sharded checkpoint, which any number of processes may have written."""
        from ..checkpoints.sharded_tensors import read_shards, tensor_shapes_in

        for key, saved in tensor_shapes_in(folder).items():
            if key.startswith("optim."):
                parameter, slots, slot = self.optimizer_slot(key.removeprefix("optim."))
                like = parameter if saved.shape == parameter.shape else torch.empty(saved.shape)
                slots[slot] = torch.zeros_like(like, dtype=saved.dtype)
        read_shards(folder, self.sharded_tensors())
        self.step = step

    def optimizer_slot(self, key: str) -> tuple[nn.Parameter, dict[str, Tensor], str]:
        """Find parameter, optimizer state and slot by the name in a checkpoint, such as "head.bias.exp_avg"."""
        name, _, slot = key.rpartition(".")
        parameter = self.model.get_parameter(name)
        groups = ((optimizer, group) for optimizer in self.optimizers for group in optimizer.param_groups)
        owner = next(optimizer for optimizer, group in groups if any(p is parameter for p in group["params"]))
        return parameter, owner.state[parameter], slot


def mixes_pairs(config: Config) -> bool:
    """Whether augmentation mixes neighboring images of a batch, which then belong in the same process."""
    return config.augment.mixup > 0 or config.augment.cutmix > 0


def own_range(size: int, group: ProcessGroup, *, in_pairs: bool) -> tuple[int, int]:
    """Return which images of a micro-batch this process computes; pairs stay together.

    Args:
        size: The number of images of the micro-batch.
        group: The processes; their shares differ by at most one image or pair.
        in_pairs: Whether images 2i and 2i + 1 belong together.
    """
    unit = 2 if in_pairs else 1
    num_units = -(-size // unit)
    start, stop = (unit * (num_units * rank // group.size) for rank in (group.rank, group.rank + 1))
    return start, min(stop, size)


def check_batch_size(config: Config, group: ProcessGroup) -> None:
    """Raise ConfigError unless every process gets an image of each micro-batch, or a pair for mixup and cutmix."""
    size, in_pairs = config.batch_size // config.grad_accum_steps, mixes_pairs(config)
    smallest = group.size * (2 if in_pairs else 1)
    if size < group.size or (in_pairs and group.size > 1 and size < smallest):
        per_process = "two images (mixup and cutmix mix pairs)" if in_pairs else "one image"
        raise ConfigError(
            f"batch_size {config.batch_size} in {config.grad_accum_steps} micro-batches is too small for {group.size} "
            f"processes, each of which needs {per_process}. Use at least {smallest * config.grad_accum_steps}."
        )
    if in_pairs and size % 2 and group.size * config.grad_accum_steps > 1:
        raise ConfigError(
            f"augment.mixup and augment.cutmix mix pairs, so batch_size / grad_accum_steps must be even, not {size}. "
            "Change batch_size or grad_accum_steps."
        )
