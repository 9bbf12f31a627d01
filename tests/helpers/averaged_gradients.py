"""One of several processes that average gradients: a child of `runs.Nursery`. Fails if they are wrong."""

import contextlib

import torch
from torch import nn

from patchword.training import distributed as module
from patchword.training.distributed import ProcessGroup, make_buckets


def main() -> None:
    module.BUCKET_BYTES = 100  # floats: 25
    with contextlib.closing(ProcessGroup()) as world:
        shapes = [(3, 5), (2, 2), (30,), (7,), (4, 4)]
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        generator = torch.Generator().manual_seed(0)
        everyone = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(world.size)]
        for parameter, gradient in zip(parameters, everyone[world.rank], strict=True):
            parameter.grad = gradient.clone()
        parameters[3].grad = None
        parameters[4].grad = everyone[world.rank][4].t().clone()  # as a convolution's may be: not contiguous
        assert [len(b) for b in make_buckets(p.grad for p in parameters if p.grad is not None)] == [2, 1, 1]
        world.average_gradients(parameters)
        means = [torch.stack(each).mean(0) for each in zip(*everyone, strict=True)]
        assert parameters[3].grad is None
        means[4] = means[4].t()
        for place in (0, 1, 2, 4):
            torch.testing.assert_close(parameters[place].grad, means[place])


if __name__ == "__main__":
    main()
