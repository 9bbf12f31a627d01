"""The processes of a run: one, or those that torchrun started, each with its share of every batch."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class World:
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
            dist.init_process_group(backend, timeout=timedelta(minutes=30))

    @property
    def first(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.rank == 0

    def mean(self, values: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(values)
            values /= self.size
        return values

    def shared(self, value: Any) -> Any:
        """The first process's value, everywhere."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gathered(self, value: Any) -> list[Any]:
        """The values of all processes, by rank."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

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
