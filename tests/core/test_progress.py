"""Progress where there is no terminal."""

import time
from types import SimpleNamespace

import pytest

from patchword.core import progress as progress_module
from patchword.core.progress import download_progress, format_seconds, progress, rate_progress, working


def wait_for_line(capsys: pytest.CaptureFixture[str], text: str) -> bool:
    """Wait until a line with this text is printed; the timeout only prevents a hang."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if text in capsys.readouterr().err:
            return True
        time.sleep(0.01)
    return False


def test_lines_count_steps_and_bytes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "SECONDS_PER_LINE", 0.01)
    with progress("testing", 3) as step:
        assert wait_for_line(capsys, "testing: 0 of 3")
        assert step()
        assert wait_for_line(capsys, "testing: 1 of 3")
    with working("opening engine onnx"):
        assert wait_for_line(capsys, "opening engine onnx (")
    with download_progress("cifar10") as update:
        update(1_500_000, 3_000_000)
        assert wait_for_line(capsys, "downloading cifar10: 1.5 of 3.0 MB")
        update(2_000_000, None)
        assert wait_for_line(capsys, "downloading cifar10: 2.0 MB")


def test_rate_and_time_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate counts from the first images on: before them, a worker starts."""
    monkeypatch.setattr(progress_module, "SECONDS_PER_LINE", 0.01)
    with rate_progress("predicting", 2000, done=1000) as add:
        assert wait_for_line(capsys, "predicting: 1,000 of 2,000 images (")
        add(100)
        assert wait_for_line(capsys, "predicting: 1,100 of 2,000 images")
        add(900)
        assert wait_for_line(capsys, "predicting: 2,000 of 2,000 images, ")
        add(-400)  # a worker died
        assert wait_for_line(capsys, "predicting: 1,600 of 2,000 images, ")
        assert wait_for_line(capsys, " left (")


def test_rate_with_a_clock_that_stands_still(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "SECONDS_PER_LINE", 0.01)
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: 5.0))
    with rate_progress("predicting", 20) as add:
        add(1)
        add(1)
        assert wait_for_line(capsys, "predicting: 2 of 20 images, ")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (89, "89 s"),
        (600, "10 min"),
        (11_400, "3 h 10 min"),
        (36 * 3600, "36 h 0 min"),
        (1e6, "11 d 14 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_short_work_prints_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "SECONDS_PER_LINE", 3600.0)  # a busy machine may need more than the usual
    with progress("testing", 1) as step, working("working"), download_progress("data"):
        step()
    assert capsys.readouterr() == ("", "")
