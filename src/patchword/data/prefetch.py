"""Ordered prefetching on background threads."""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from ..core.runtime import set_num_threads

Item = TypeVar("Item")
Result = TypeVar("Result")


def prefetch(
    function: Callable[[Item], Result], items: Iterable[Item], num_workers: int
) -> Generator[Result, None, None]:
    """Yield `function(item)` for each item, in order, computed ahead on `num_workers` threads.

    Each thread uses one core: threads that work on different items never wait for each other, whereas an operation
    that is split over all cores waits for the slowest. Threads rather than processes: decoding and tensor operations
    release the GIL, nothing is copied, and a killed run leaves no child processes or shared memory behind.

    Args:
        num_workers: number of threads; at most `2 * num_workers + 1` items are in flight. 0 computes each item in the
            calling thread when it is requested.
    """
    if num_workers == 0:
        yield from map(function, items)
        return
    num_threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(num_workers, initializer=set_num_threads, initargs=(1,))
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > 2 * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        with contextlib.suppress(RuntimeError):
            torch.set_num_threads(num_threads)  # a worker's setting is inherited by threads that start later
