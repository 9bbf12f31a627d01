"""One of several processes that average gradients; run by `runs.ForkServer`. Fails if an average is wrong."""

import contextlib

import torch
from torch import nn

from patchword.training import distributed
from patchword.training.distributed import ProcessGroup, make_buckets


def main() -> None:
    distributed.BUCKET_BYTES = 100  # 25 floats
    with contextlib.closing(ProcessGroup()) as group:
        shapes = [(3, 5), (2, 2), (30,), (7,), (4, 4)]
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        generator = torch.Generator().manual_seed(0)
        gradients = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(group.size)]
        for parameter, gradient in zip(parameters, gradients[group.rank], strict=True):
            parameter.grad = gradient.clone()
        parameters[3].grad = None
        parameters[4].grad = gradients[group.rank][4].t().clone()  # not contiguous, as that of a convolution may be
        assert [len(b) for b in make_buckets(p.grad for p in parameters if p.grad is not None)] == [2, 1, 1]
        group.average_gradients(parameters)
        means = [torch.stack(per_rank).mean(0) for per_rank in zip(*gradients, strict=True)]
        assert parameters[3].grad is None
        means[4] = means[4].t()
        for index in (0, 1, 2, 4):
            torch.testing.assert_close(parameters[index].grad, means[index])


if __name__ == "__main__":
    main()
