"""The processes of a run: one, or those that torchrun started, each with its share of every batch."""

import os
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import PatchwordError
from .rendezvous import elastic_store

TIMEOUT = timedelta(minutes=30)  # until a process that does not answer is given up
BUCKET_BYTES = 25 * 2**20  # of gradients that are averaged at once: bounds the memory for the copy


class ProcessGroup:
    """Rank and size; what the processes tell each other. Alone, every exchange is the identity."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        self.owner = self.size > 1 and not dist.is_initialized()
        if self.owner:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            store = elastic_store(self.rank, self.size, TIMEOUT)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=TIMEOUT)

    @property
    def first(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.rank == 0

    def mean(self, values: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(values)
            values /= self.size
        return values

    @torch.no_grad()
    def average_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Replaces gradients by their mean over all processes; parameters without one are left without.

        Not DistributedDataParallel: that rearranges its buckets after the first step, and from three processes on the
        place of a number in its bucket decides the order of summation. A resumed run, whose buckets are fresh, would
        not be bit-identical. Here buckets are a function of the model alone.
        """
        if self.size == 1:
            return
        for bucket in buckets(p.grad for p in parameters if p.grad is not None):
            flat = self.mean(torch.cat([gradient.reshape(-1) for gradient in bucket]))
            pieces = flat.split([gradient.numel() for gradient in bucket])
            means = [piece.view(g.shape) for piece, g in zip(pieces, bucket, strict=True)]
            torch._foreach_copy_(bucket, means)

    def shared(self, value: Any) -> Any:
        """The first process's value, everywhere."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What `make` returns in the first process, everywhere; so is an error that the user can fix."""
        made, error = None, None
        if self.first:
            try:
                made = make()
            except PatchwordError as raised:
                error = raised
        made, error = self.shared((made, error))
        if error is not None:
            raise error
        return made

    def gathered(self, value: Any) -> list[Any]:
        """The values of all processes, by rank."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def share_state(self, model: nn.Module) -> None:
        """Gives the model the first process's weights and buffers everywhere."""
        if self.size > 1:
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, src=0)

    def agree(self, model: nn.Module) -> None:
        """Gives the model the first process's buffers everywhere: each gathers statistics of its own."""
        if self.size > 1:
            for buffer in (b for b in model.buffers() if b.is_floating_point()):
                dist.broadcast(buffer, src=0)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        if self.owner:
            dist.destroy_process_group()


def buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in their order, in lists of at most BUCKET_BYTES, or of one tensor that is larger."""
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
