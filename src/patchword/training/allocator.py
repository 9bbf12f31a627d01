"""Memory that training frees and takes again at every step stays with the process.

glibc gives large blocks back to the system at once and gets them again page by page, each page zeroed by the kernel: a
tenth of the time of a step on two cores, and more where several threads wait for the same lock.
"""

import ctypes
import functools
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # <malloc.h>
NEVER, PAD = 2**31 - 1, 2**26


@functools.lru_cache(maxsize=1)
def keep_memory() -> None:
    """For the whole process, since malloc has no smaller unit. Does nothing where the library is not glibc."""
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_THRESHOLD, 2**30)
    mallopt(M_TRIM_THRESHOLD, NEVER)
    mallopt(M_TOP_PAD, PAD)
