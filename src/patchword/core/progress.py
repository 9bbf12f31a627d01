"""Progress on standard error: a live bar on a terminal, and a line every few seconds elsewhere, as in logs of CI."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .text import print_stderr

SECONDS_PER_LINE = 5.0  # where there is no terminal


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[], bool]]:
    """Show how many of `total` steps are done.

    Yields:
        A function to call after each step; it returns True.
    """
    if not sys.stderr.isatty():
        done = 0

        def count() -> bool:
            nonlocal done
            done += 1
            return True

        with report_lines(lambda: f"{title}: {done:,} of {total:,}"):
            yield count
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)

        def step() -> bool:
            bar.advance(task)
            return True

        yield step


@contextmanager
def rate_progress(title: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Show how many of `total` images are done, how fast they are, and how long the rest takes.

    Args:
        title: What is done.
        total: The number of images.
        done: Those that an earlier process has done: they do not count for the rate.

    Yields:
        A function to call with the number of further images. It may be called from any thread.
    """
    count, first = 0, (0, 0.0)  # images, and when the first of them were done: the start of a worker takes seconds

    def describe() -> str:
        text = f"{title}: {done + count:,} of {total:,} images"
        if count <= first[0]:
            return text
        rate = (count - first[0]) / max(time.monotonic() - first[1], 1e-3)  # clocks may be coarse
        return f"{text}, {rate:,.1f} images/s, {format_seconds((total - done - count) / rate)} left"

    def add(further: int) -> None:
        nonlocal count, first
        first = first if first[1] else (count + further, time.monotonic())  # before `count`: a thread reads both
        count += further

    if not sys.stderr.isatty():
        with report_lines(describe):
            yield add
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    with Progress(BarColumn(), TextColumn("{task.description}"), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total, completed=done)

        def advance(further: int) -> None:
            add(further)
            bar.update(task, completed=done + count, description=describe())

        yield advance


def format_seconds(seconds: float) -> str:
    """Format a duration with two units, as in "3 h 10 min"."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    hours = round(seconds / 3600)
    return f"{minutes // 60} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


@contextmanager
def working(title: str) -> Iterator[None]:
    """Show that something of unknown length is running, such as the building of an engine."""
    if not sys.stderr.isatty():
        with report_lines(lambda: title):
            yield
        return
    from rich.console import Console

    with Console(stderr=True).status(title):
        yield


@contextmanager
def download_progress(title: str) -> Iterator[Callable[[int, int | None], None]]:
    """Show how many bytes have arrived, once the first have.

    Yields:
        A function to call with the number of bytes so far, and the total if known.
    """
    done, total = 0, None

    def describe() -> str:
        if not done:  # nothing is downloaded if the file is cached
            return ""
        size = f" of {total / 1e6:,.1f}" if total else ""
        return f"downloading {title}: {done / 1e6:,.1f}{size} MB"

    def update(bytes_so_far: int, total_bytes: int | None) -> None:
        nonlocal done, total
        done, total = bytes_so_far, total_bytes

    with report_lines(describe):
        yield update


@contextmanager
def report_lines(describe: Callable[[], str]) -> Iterator[None]:
    """Print a line with the elapsed time every few seconds, from a thread: a single step may take a minute."""
    stopped, start = threading.Event(), time.monotonic()

    def report() -> None:
        while not stopped.wait(SECONDS_PER_LINE):
            if text := describe():
                print_stderr(f"{text} ({time.monotonic() - start:.0f} s)")

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
