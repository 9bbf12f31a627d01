"""The processes of a run: one, or those that torchrun started, each with its slice of every batch."""

import os
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import Config
from ..errors import PatchwordError
from .rendezvous import elastic_store

Value = TypeVar("Value")

BUCKET_BYTES = 25 * 2**20  # of gradients that are averaged at once: bounds the memory for the copy


class ProcessGroup:
    """Rank, size, device and collective operations. With one process every collective is the identity.

    Args:
        timeout: Seconds until the job is aborted because a process does not respond.
    """

    def __init__(self, timeout: float = 600.0) -> None:
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        self.is_owner = self.size > 1 and not dist.is_initialized()
        if self.is_owner:
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            limit = timedelta(seconds=timeout)
            store = elastic_store(self.rank, self.size, limit)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=limit)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and reports to the user."""
        return self.rank == 0

    def shards(self, config: Config) -> bool:
        """Whether the processes share one model (FSDP). One process has nothing to share: it trains as with "ddp"."""
        return config.parallel == "fsdp" and self.size > 1

    def all_reduce_mean(self, values: Tensor) -> Tensor:
        """Return the mean over all processes, computed in place."""
        if self.size > 1:
            dist.all_reduce(values)
            values /= self.size
        return values

    @torch.no_grad()
    def average_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Replace gradients by their mean over all processes; parameters without a gradient keep none.

        Not DistributedDataParallel: it rearranges its buckets after the first step, and with three or more processes
        the position of a value in its bucket decides the order of summation. A resumed run starts with fresh buckets
        and would not be bit-identical. Here the buckets depend on the model only.
        """
        if self.size == 1:
            return
        for bucket in make_buckets(p.grad for p in parameters if p.grad is not None):
            flat = self.all_reduce_mean(torch.cat([gradient.reshape(-1) for gradient in bucket]))
            chunks = torch.split(flat, [gradient.numel() for gradient in bucket])
            means = [chunk.view(g.shape) for chunk, g in zip(chunks, bucket, strict=True)]
            torch._foreach_copy_(bucket, means)

    def broadcast(self, value: Value) -> Value:
        """Return the main process's value, which must be picklable."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def sum_numbers(self, values: list[float]) -> list[float]:
        """Return the sums of each number over all processes, in one collective operation."""
        if self.size == 1:
            return values
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers)
        return numbers.tolist()

    def run_on_main(self, function: Callable[[], Value]) -> Value:
        """Call `function` in the main process only, and return its result in every process.

        A `PatchwordError` is raised in every process, so that all of them end with the same message.
        """
        result: Any = None
        error: PatchwordError | None = None
        if self.is_main:
            try:
                result = function()
            except PatchwordError as raised:
                error = raised
        result, error = self.broadcast((result, error))
        if error is not None:
            raise error
        return result  # the main process's value

    def all_gather(self, value: Value) -> list[Value]:
        """Return the values of all processes, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def gather(self, value: Value) -> list[Value] | None:
        """Return the values of all processes, by rank, in the main process; None in the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, values, dst=0)
        return values

    def broadcast_state(self, model: nn.Module) -> None:
        """Give every process the main process's weights and buffers."""
        if self.size > 1:
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, src=0)

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Give every process the main process's batch norm statistics, which each updates from its own samples."""
        if self.size > 1:
            for buffer in (b for b in model.buffers() if b.is_floating_point()):
                dist.broadcast(buffer, src=0)

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the job."""
        if self.is_owner:
            dist.destroy_process_group()


def make_buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors, in order, into lists of at most BUCKET_BYTES, or of one larger tensor."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
