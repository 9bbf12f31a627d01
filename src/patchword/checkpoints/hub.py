"""Downloading models from the Hugging Face Hub: `hf:owner/name[@revision]` to a local directory.

This module selects the files of a model, verifies their checksums and explains errors. huggingface_hub does the
download, authentication and caching: HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE work as documented there. The
content of the files is read elsewhere.
"""

import re
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import urlsplit

from ..core.io import file_digest
from ..core.progress import report_lines
from ..errors import HubError

EXAMPLE = "hf:google/vit-base-patch16-224 or hf:google/vit-base-patch16-224@main"
DESCRIPTIONS = ("model.json", "config.json", "preprocessor_config.json", "open_clip_config.json")
SHARDS = "model-*-of-*.safetensors"
# The first pattern with a match is used: safetensors before formats that contain pickles or need conversion.
PICKLES = ("pytorch_model.bin", "open_clip_pytorch_model.bin", "*.pth")
WEIGHTS = ("model.safetensors", SHARDS, "*.safetensors", *PICKLES, "*.npz")

_REFERENCE = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@(\w[\w./+-]*))?", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CONNECTION_ADVICE = (
    "Check the connection, give the path of a local model instead, set HF_ENDPOINT to a mirror that can be reached, "
    "or copy a cache from another machine and set HF_HUB_OFFLINE=1."
)


def download_model(reference: str, *, cache: Path | None = None, endpoint: str | None = None) -> Path:
    """Download `hf:owner/name[@revision]` unless it is cached, and return its directory."""
    repo, revision = parse_reference(reference)
    from huggingface_hub import constants

    endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
    storage = Path(cache or constants.HF_HUB_CACHE).expanduser() / f"models--{repo.replace('/', '--')}"
    disable_hub_extras(endpoint)
    try:
        return _download(repo, revision, storage, endpoint)
    except HubError:
        raise
    except Exception as error:  # huggingface_hub passes on the errors of its HTTP client, its parser and the disk
        raise HubError(_explain_error(error, repo, revision, storage, endpoint)) from error


def parse_reference(reference: str) -> tuple[str, str]:
    """Split a reference into repository and revision."""
    from huggingface_hub.utils._validators import validate_repo_id  # `utils` does not export it explicitly

    match = _REFERENCE.fullmatch(reference)
    try:
        if match is None or ".." in reference:  # a revision becomes a path inside the cache
            raise ValueError("expected hf:owner/name or hf:owner/name@revision")
        validate_repo_id(match[1])
    except ValueError as error:
        raise HubError(f"{reference!r} is not the name of a model on a hub: {error}. Write {EXAMPLE}.") from error
    return match[1], match[2] or "main"


def disable_hub_extras(endpoint: str) -> None:
    """Disable Xet transfers and telemetry for any endpoint but the public hub.

    Mirrors repeat the hub's Xet headers without its storage, and telemetry goes to huggingface.co, where a machine that
    needs a mirror waits for a timeout. huggingface_hub has no arguments for either.
    """
    from huggingface_hub import constants

    if urlsplit(endpoint).hostname not in ("huggingface.co", "hf.co"):
        constants.HF_HUB_DISABLE_XET = True
        constants.HF_HUB_DISABLE_TELEMETRY = True


def _download(repo: str, revision: str, storage: Path, endpoint: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        commit, checksums = _list_files(repo, revision, endpoint)
    except Exception:
        if cached := _find_cached(storage, revision):
            return cached
        raise
    # Weights come last, so that a directory with weights is complete.
    for name in _select_files(checksums, f"{repo} at {endpoint}"):
        # With a commit hash, the library uses its cache without another request.
        with _report_download(f"{repo}/{name}"):
            path = hf_hub_download(repo, name, revision=commit, cache_dir=storage.parent, endpoint=endpoint)
        _verify(Path(path), checksums[name])
    _save_ref(storage, revision, commit)
    return storage / "snapshots" / commit


def _report_download(title: str) -> AbstractContextManager[None]:
    """Print a line every few seconds where there is no terminal; on a terminal, huggingface_hub shows a bar."""
    return nullcontext() if sys.stderr.isatty() else report_lines(lambda: f"downloading {title}")


def _list_files(repo: str, revision: str, endpoint: str) -> tuple[str, dict[str, str | None]]:
    """Return the commit of a revision, and its files with their SHA-256 where the hub provides it."""
    from huggingface_hub import HfApi, constants

    api = HfApi(endpoint=endpoint)
    info = api.model_info(repo, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    if not info.sha or info.siblings is None:
        raise HubError(f"{endpoint} did not list the files of {repo}. Is it a Hugging Face hub? Check HF_ENDPOINT.")
    return info.sha, {file.rfilename: file.lfs.sha256 if file.lfs else None for file in info.siblings}


def _select_files(names: Iterable[str], where: str) -> list[str]:
    """Select the files of a model: JSON files first, then one set of weights."""
    files = sorted(name for name in names if "/" not in name)
    for pattern in WEIGHTS:
        if weights := [name for name in files if fnmatch(name, pattern)]:
            break
    else:
        raise HubError(f"{where} has no weights that patchword can read ({', '.join(WEIGHTS)}); it has: {files}.")
    descriptions = [name for name in DESCRIPTIONS if name in files]
    if pattern != SHARDS:
        if len(weights) > 1:
            raise HubError(f"{where} has several models: {weights}. Download one and give its path.")
        return descriptions + weights
    index = "model.safetensors.index.json"
    if index not in files or not weights[0].endswith(f"-of-{len(weights):05}.safetensors"):
        raise HubError(f"{where} has an incomplete sharded model: {weights}, {index} or a shard is missing.")
    return [*descriptions, index, *weights]


def _find_cached(storage: Path, revision: str) -> Path | None:
    """Return the directory of an earlier download, by any program, if its model is complete."""
    ref = storage / "refs" / revision
    folder = storage / "snapshots" / (ref.read_text().strip() if ref.is_file() else revision)
    try:
        names = _select_files((path.name for path in folder.glob("*") if path.exists()), str(folder))
    except HubError:
        return None
    for name in names:
        # The library names the blob of a large file by its SHA-256, so it can be verified offline.
        link = folder / name
        blob = link.readlink().name if link.is_symlink() else ""
        _verify(link, blob if _SHA256.fullmatch(blob) else None)
    return folder


def _verify(path: Path, sha256: str | None) -> None:
    """Verify the checksum of a downloaded file once; a marker file records the size and time of the verified file."""
    if sha256 is None:
        return
    stat = path.stat()
    stamp = f"{stat.st_size} {stat.st_mtime_ns}"
    marker = path.parents[2] / ".patchword" / sha256  # <cache>/models--owner--name/snapshots/<commit>/<file>
    if marker.is_file() and marker.read_text() == stamp:
        return
    if (actual := file_digest(path, "sha256")) != sha256:
        _discard(path)
        raise HubError(f"{path.name} is damaged: its SHA-256 is {actual}, not {sha256}. It was deleted; try again.")
    with suppress(OSError):  # in a read-only cache, files are verified each time
        marker.parent.mkdir(exist_ok=True)
        marker.write_text(stamp)


def _discard(path: Path) -> None:
    """Delete a file of the cache and all its link targets."""
    while path.is_symlink():
        target = path.parent / path.readlink()
        path.unlink()
        path = target
    path.unlink(missing_ok=True)


def _save_ref(storage: Path, revision: str, commit: str) -> None:
    """Record the commit of a branch or tag for offline use, where huggingface_hub also looks for it."""
    ref = storage / "refs" / revision
    if revision == commit or (ref.is_file() and ref.read_text() == commit):
        return
    with suppress(OSError):
        ref.parent.mkdir(parents=True, exist_ok=True)
        part = ref.with_name(f"{ref.name}.part")
        part.write_text(commit)
        part.replace(ref)


def _explain_error(error: Exception, repo: str, revision: str, storage: Path, endpoint: str) -> str:
    """Say what failed and what to do."""
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RevisionNotFoundError

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, OfflineModeIsEnabled):
        return (
            f"{repo} (revision {revision}) is not in the cache, {storage}, and HF_HUB_OFFLINE prevents its download. "
            "Unset HF_HUB_OFFLINE, or give the path of a local model."
        )
    if isinstance(error, GatedRepoError):
        return f"{repo} is gated. Accept its terms at {endpoint}/{repo}, then set HF_TOKEN to a token of that account."
    if isinstance(error, RevisionNotFoundError):
        return f"{repo} at {endpoint} has no revision {revision!r}. Omit @{revision} for the latest."
    if status in (401, 403, 404):  # the hub sends any of these for private repositories
        return f"{endpoint} has no model {repo} (HTTP {status}). Check the name; if it is private, set HF_TOKEN."
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
        return f"Could not store {repo} in {storage}: {error}. Free some space, or set HF_HOME to another directory."
    reason = str(error).strip().partition("\n")[0]
    return f"Could not download {repo} from {endpoint} ({type(error).__name__}: {reason}). {_CONNECTION_ADVICE}"
