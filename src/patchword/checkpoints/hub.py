"""Models by name: `hf:owner/name[@revision]` in, a local model folder out.

Owns which files of a repository make a model, the checksum of what arrived, and the sentence a user reads when nothing
did. The download itself, tokens and the cache are huggingface_hub's (HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE
work as documented there). Does not know what is inside the files.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import urlsplit

from ..core.io import file_digest
from ..errors import HubError

EXAMPLE = "hf:google/vit-base-patch16-224 or hf:google/vit-base-patch16-224@main"
DESCRIPTIONS = ("model.json", "config.json", "preprocessor_config.json")
SHARDS = "model-*-of-*.safetensors"
# The first line that a repository has is taken: safetensors before formats that hold pickles or need converting.
WEIGHTS = ("model.safetensors", SHARDS, "*.safetensors", "pytorch_model.bin", "*.pth", "*.npz")

_REFERENCE = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@(\w[\w./+-]*))?", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_WAYS_OUT = (
    "Check the connection, give the path of a local model instead, set HF_ENDPOINT to a mirror that can be reached, "
    "or copy a filled cache here and set HF_HUB_OFFLINE=1."
)


def download_model(reference: str, *, cache: Path | None = None, endpoint: str | None = None) -> Path:
    """Bring the model `hf:owner/name[@revision]` here, unless it is here already, and return its folder."""
    repo, revision = parse_reference(reference)
    from huggingface_hub import constants

    endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
    storage = Path(cache or constants.HF_HUB_CACHE).expanduser() / f"models--{repo.replace('/', '--')}"
    use_plain_http(endpoint)
    try:
        return _fetch(repo, revision, storage, endpoint)
    except HubError:
        raise
    except Exception as error:  # the library lets through what its HTTP client, its parser or the disk raises
        raise HubError(_explain(error, repo, revision, storage, endpoint)) from error


def parse_reference(reference: str) -> tuple[str, str]:
    """Split a reference into repository and revision."""
    from huggingface_hub.utils import validate_repo_id

    match = _REFERENCE.fullmatch(reference)
    try:
        if match is None or ".." in reference:  # a revision becomes a path inside the cache
            raise ValueError("expected hf:owner/name or hf:owner/name@revision")
        validate_repo_id(match[1])
    except ValueError as error:
        raise HubError(f"{reference!r} is not the name of a model on a hub: {error}. Write {EXAMPLE}.") from error
    return match[1], match[2] or "main"


def use_plain_http(endpoint: str) -> None:
    """Keep to the plain protocol at any endpoint but the public hub.

    Mirrors repeat the hub's Xet headers without having its storage, and the library's question about the user agent
    goes to huggingface.co, where a machine that needs a mirror waits for a timeout. Neither has an argument.
    """
    from huggingface_hub import constants

    if urlsplit(endpoint).hostname not in ("huggingface.co", "hf.co"):
        constants.HF_HUB_DISABLE_XET = True
        constants.HF_HUB_DISABLE_TELEMETRY = True


def _fetch(repo: str, revision: str, storage: Path, endpoint: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        commit, checksums = _ask(repo, revision, endpoint)
    except Exception:
        if cached := _cached(storage, revision):
            return cached
        raise
    # Weights come last, so that a folder with weights is a whole one.
    for name in _choose(checksums, f"{repo} at {endpoint}"):
        # Asked by commit, the library answers from its cache without another request.
        path = hf_hub_download(repo, name, revision=commit, cache_dir=storage.parent, endpoint=endpoint)
        _verify(Path(path), checksums[name])
    _remember(storage, revision, commit)
    return storage / "snapshots" / commit


def _ask(repo: str, revision: str, endpoint: str) -> tuple[str, dict[str, str | None]]:
    """Return the commit that a revision stands for, and its files with their sha256 where the hub knows it."""
    from huggingface_hub import HfApi, constants

    api = HfApi(endpoint=endpoint)
    info = api.model_info(repo, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    if not info.sha or info.siblings is None:
        raise HubError(f"{endpoint} did not say which files {repo} has. Is it a Hugging Face hub? Check HF_ENDPOINT.")
    return info.sha, {file.rfilename: file.lfs.sha256 if file.lfs else None for file in info.siblings}


def _choose(names: Iterable[str], where: str) -> list[str]:
    """Pick the files that make a model: descriptions first, then one set of weights."""
    files = sorted(name for name in names if "/" not in name)
    for pattern in WEIGHTS:
        if weights := [name for name in files if fnmatch(name, pattern)]:
            break
    else:
        raise HubError(f"{where} has no weights that patchword reads ({', '.join(WEIGHTS)}); it has: {files}.")
    descriptions = [name for name in DESCRIPTIONS if name in files]
    if pattern != SHARDS:
        if len(weights) > 1:
            raise HubError(f"{where} has several models: {weights}. Download one and give its path.")
        return descriptions + weights
    index = "model.safetensors.index.json"
    if index not in files or not weights[0].endswith(f"-of-{len(weights):05}.safetensors"):
        raise HubError(f"{where} has only a part of a model in several files: {weights}, and perhaps no {index}.")
    return [*descriptions, index, *weights]


def _cached(storage: Path, revision: str) -> Path | None:
    """Return the folder of an earlier download, by whichever program, if it has a whole model."""
    ref = storage / "refs" / revision
    folder = storage / "snapshots" / (ref.read_text().strip() if ref.is_file() else revision)
    try:
        names = _choose((path.name for path in folder.glob("*") if path.exists()), str(folder))
    except HubError:
        return None
    for name in names:
        # The library names the blob of a large file by its sha256, so no hub is needed to check it.
        link = folder / name
        blob = link.readlink().name if link.is_symlink() else ""
        _verify(link, blob if _SHA256.fullmatch(blob) else None)
    return folder


def _verify(path: Path, sha256: str | None) -> None:
    """Compare a downloaded file with its checksum, once: a seal says which file (size and time) was found good."""
    if sha256 is None:
        return
    stat = path.stat()
    stamp = f"{stat.st_size} {stat.st_mtime_ns}"
    seal = path.parents[2] / ".patchword" / sha256  # <cache>/models--owner--name/snapshots/<commit>/<file>
    if seal.is_file() and seal.read_text() == stamp:
        return
    if (found := file_digest(path, "sha256")) != sha256:
        _discard(path)
        raise HubError(f"{path.name} arrived damaged: sha256 {found}, not {sha256}. It was deleted; try again.")
    with suppress(OSError):  # a cache that is read-only is checked each time
        seal.parent.mkdir(exist_ok=True)
        seal.write_text(stamp)


def _discard(path: Path) -> None:
    """Delete a file of the cache and everything it links to."""
    while path.is_symlink():
        target = path.parent / path.readlink()
        path.unlink()
        path = target
    path.unlink(missing_ok=True)


def _remember(storage: Path, revision: str, commit: str) -> None:
    """Note what a branch or tag stood for, for the day without a hub, where huggingface_hub looks for it too."""
    ref = storage / "refs" / revision
    if revision == commit or (ref.is_file() and ref.read_text() == commit):
        return
    with suppress(OSError):
        ref.parent.mkdir(parents=True, exist_ok=True)
        part = ref.with_name(f"{ref.name}.part")
        part.write_text(commit)
        part.replace(ref)


def _explain(error: Exception, repo: str, revision: str, storage: Path, endpoint: str) -> str:
    """Say what went wrong and what to do."""
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RevisionNotFoundError

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, OfflineModeIsEnabled):
        return (
            f"{repo} (revision {revision}) is not in the cache, {storage}, and HF_HUB_OFFLINE forbids to download it. "
            "Unset HF_HUB_OFFLINE, or give the path of a local model."
        )
    if isinstance(error, GatedRepoError):
        return f"{repo} is gated. Accept its terms at {endpoint}/{repo}, then set HF_TOKEN to a token of that account."
    if isinstance(error, RevisionNotFoundError):
        return f"{repo} at {endpoint} has no revision {revision!r}. Leave out @{revision} for the newest."
    if status in (401, 403, 404):  # the hub hides private repositories behind any of these
        return f"{endpoint} shows no model {repo} (HTTP {status}). Check the name; if it is private, set HF_TOKEN."
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
        return f"Could not store {repo} in {storage}: {error}. Free some space, or set HF_HOME to another folder."
    reason = str(error).strip().partition("\n")[0]
    return f"Could not get {repo} from {endpoint} ({type(error).__name__}: {reason}). {_WAYS_OUT}"
