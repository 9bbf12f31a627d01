"""Facts about the machine: cores that other processes keep busy."""

import pytest

from patchword.core import runtime


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([0, 0, 0, 0, 0], [0, 0, 0, 200, 0], 0.0),  # idle
        ([10, 0, 0, 500, 0], [110, 0, 0, 600, 0], 0.5),  # half of all cores
        ([10, 5, 5, 500, 7], [10, 55, 55, 500, 7], 1.0),
        ([10, 0, 0, 500, 0], [10, 0, 0, 500, 100], 0.0),  # waiting for the disk
        ([], [], 0.0),  # not Linux
    ],
)
def test_busy_cores(monkeypatch: pytest.MonkeyPatch, before: list[int], after: list[int], expected: float) -> None:
    times = iter([before, after])
    monkeypatch.setattr(runtime, "_cpu_times", lambda: next(times))
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert runtime.busy_cores(seconds=0) == pytest.approx(8 * expected)
