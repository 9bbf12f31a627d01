"""Images of commands at work: the terminal of `patchword quickstart`, and the web page of `patchword serve`."""

import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from .photos import JPEG_QUALITY, MODEL, photo_paths, read_class_labels

PATCHWORD = (sys.executable, "-m", "patchword")
COLUMNS = 116
PROGRESS = re.compile(r" *\d+%  epoch ")
START_SECONDS = 120


def record_quickstart(path: Path) -> None:
    """Run `patchword quickstart` and draw its output as a terminal."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"COLUMNS": str(COLUMNS)}
        run = subprocess.run(
            [*PATCHWORD, "quickstart"], cwd=folder, env=environment, text=True, check=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    # Lines of progress such as " 25%  epoch 10.04  loss ..." are a transient bar on a terminal.
    lines = [line for line in run.stdout.replace(f"{folder}/", "").splitlines() if not PROGRESS.match(line)]
    path.write_text(terminal_svg("patchword quickstart", "\n".join(lines)))


def terminal_svg(command: str, output: str) -> str:
    """A terminal with a command and its output, without references to outside fonts."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
    console.print(Text(output.rstrip()))
    svg = console.export_svg(title=command, unique_id="patchword")
    return re.sub(r"@font-face\s*\{.*?\}\s*", "", svg, flags=re.DOTALL)


@contextmanager
def serving() -> Iterator[str]:
    """The address of `patchword serve` with the model of the figures."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [*PATCHWORD, "serve", MODEL, "--port", str(port)]
        if labels := read_class_labels():
            (Path(folder) / "labels.json").write_text(json.dumps(labels))
            command += ["--labels", f"{folder}/labels.json"]
        server = subprocess.Popen(command)
        try:
            wait_until_ready(f"http://127.0.0.1:{port}/")
            yield f"http://127.0.0.1:{port}/"
        finally:
            server.terminate()
            server.wait(30)


def wait_until_ready(address: str) -> None:
    """Wait until the server responds."""
    for _ in range(4 * START_SECONDS):
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            time.sleep(0.25)
    raise SystemExit(f"The server did not respond within {START_SECONDS} seconds.")


def capture_page(path: Path) -> None:
    """Classify and explain a photo on the web page, and take a screenshot."""
    from playwright.sync_api import sync_playwright

    browser_path = next(filter(None, map(shutil.which, ("chromium", "chromium-headless-shell", "google-chrome"))), None)
    with serving() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1120, "height": 700}, color_scheme="dark")
        page.goto(address)
        page.set_input_files("#files", str(photo_paths()[2]))
        page.wait_for_selector("#scores li")
        page.wait_for_selector("#controls", state="visible")
        page.wait_for_load_state("networkidle")
        page.wait_for_timeout(1500)
        page.screenshot(path=str(path), type="jpeg", quality=JPEG_QUALITY)
        browser.close()
