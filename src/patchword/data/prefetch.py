"""Work done ahead of whoever wants it, on threads, in order."""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from ..core.runtime import use_threads

Item = TypeVar("Item")
Result = TypeVar("Result")


def prefetch(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Generator[Result, None, None]:
    """`function` of each item, in order, on threads that each keep to one core; with no workers, when asked.

    Threads that work on different items never wait for each other, whereas tensor arithmetic that is split over all
    cores makes every core wait for the slowest. Threads, not processes: decoding and arithmetic release the
    interpreter, nothing is copied, and a run that is killed leaves no children and no shared memory behind.
    """
    if workers == 0:
        yield from map(function, items)
        return
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, initializer=use_threads, initargs=(1,))
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        with contextlib.suppress(RuntimeError):
            torch.set_num_threads(threads)  # the setting of a thread leaks into threads that start later
