"""Keep memory that a training step frees, instead of returning it to the operating system.

By default glibc returns large blocks at once and gets them back page by page, each zeroed by the kernel. That takes a
tenth of a training step on two cores, and more when several threads wait for the same lock.
"""

import ctypes
import functools
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # <malloc.h>
NEVER_TRIM, TOP_PAD, MMAP_THRESHOLD = 2**31 - 1, 2**26, 2**30


@functools.lru_cache(maxsize=1)
def retain_freed_memory() -> None:
    """Set glibc's malloc options, which apply to the whole process. Does nothing with another C library."""
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
    mallopt(M_TRIM_THRESHOLD, NEVER_TRIM)
    mallopt(M_TOP_PAD, TOP_PAD)
