"""Work that may be done ahead, on a few threads that never keep a program from ending."""

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable

MAX_WAITING = 1024  # calls; more are not worth their memory, and would come too late


class BackgroundTasks:
    """Calls functions in order, on threads that live while there is something to do.

    An error is ignored: whoever needs the result will do the work, and see the error. When the program ends, or nobody
    refers to this object any more, only the calls that have begun are completed. (The threads of an executor would
    complete all of them; daemon threads are unsafe in the code of other libraries while Python ends.)
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._tasks: deque[Callable[[], object]] = deque()
        self._running = 0
        self._lock = threading.Lock()

    def submit(self, task: Callable[[], object]) -> bool:
        """Call a function later; return False, and forget it, if too many are waiting."""
        with self._lock:
            if len(self._tasks) >= MAX_WAITING:
                return False
            self._tasks.append(task)
            if self._running >= self.num_threads:
                return True
            self._running += 1
        try:
            threading.Thread(target=run_tasks, args=(weakref.ref(self),)).start()
        except RuntimeError:  # there are too many threads, or Python ends: the next call tries again
            with self._lock:
                self._running -= 1
        return True

    def next_task(self) -> Callable[[], object] | None:
        """Return the next function for a thread; None if the thread should end."""
        with self._lock:
            if self._tasks and threading.main_thread().is_alive():
                return self._tasks.popleft()
            self._running -= 1
            return None


def run_tasks(reference: "weakref.ref[BackgroundTasks]") -> None:
    """Call functions until there is none left: the life of a thread."""
    while (tasks := reference()) is not None:
        task = tasks.next_task()
        del tasks
        if task is None:
            return
        with contextlib.suppress(Exception):  # whatever it is, the thread must go on or be counted as ended
            task()
        del task
