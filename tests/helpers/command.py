"""`patchword` as users type it: in a process of its own, or faster, in this process."""

import os
import subprocess
import sys

import pytest

from patchword.cli.main import main


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "patchword", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})


def run_in_process(capsys: pytest.CaptureFixture[str], *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command in this process: importing torch and the export libraries takes seconds."""
    with pytest.raises(SystemExit) as exit_info:
        main([str(argument) for argument in arguments])
    out, error = capsys.readouterr()
    return subprocess.CompletedProcess([], int(exit_info.value.code or 0), out, error)
