"""SIGTERM and SIGINT ask a run to save and leave; the second time they are obeyed at once."""

import signal
import threading
from types import FrameType
from typing import Any


class Stop:
    """`with Stop() as stop:` ... `if stop.signal:` save and leave."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            self.before = {s: signal.signal(s, self.ask) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def ask(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self.__exit__()

    def __exit__(self, *failure: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}
