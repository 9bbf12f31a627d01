"""Uploading a model to the Hugging Face Hub: the directory that `hf:owner/name` reads, with a model card."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import HubError
from .card import model_card, strip_paths
from .checkpoint import Checkpoint
from .hub import disable_hub_extras, parse_reference
from .model_dir import write_model_dir

if TYPE_CHECKING:
    from huggingface_hub import HfApi


def push_to_hub(checkpoint: Checkpoint, target: str, *, private: bool = False, endpoint: str | None = None) -> str:
    """Upload a checkpoint in one commit; the repository is created if it does not exist.

    HF_TOKEN and HF_ENDPOINT work as documented by huggingface_hub. An existing README.md is kept.

    Returns:
        The URL of the repository.
    """
    repo, revision = parse_reference(target)
    checkpoint = replace(checkpoint, provenance=strip_paths(checkpoint.provenance))
    from huggingface_hub import HfApi, constants

    endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
    disable_hub_extras(endpoint)
    api = HfApi(endpoint=endpoint)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        write_model_dir(folder, checkpoint)
        try:
            if ensure_repo(api, repo, private):
                card = model_card(checkpoint, repo.partition("/")[2], f"hf:{repo}")
                (folder / "README.md").write_text(card, encoding="utf-8")
            api.upload_folder(
                repo_id=repo, folder_path=folder, revision=revision, commit_message="Upload with patchword"
            )
        except HubError:
            raise
        except Exception as error:  # huggingface_hub passes on the errors of its HTTP client and parser
            raise HubError(explain_error(error, repo, endpoint)) from error
    return f"{endpoint}/{repo}"


def ensure_repo(api: "HfApi", repo: str, private: bool) -> bool:
    """Create the repository if it does not exist; return whether it needs a model card."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = api.model_info(repo)
    except RepositoryNotFoundError:  # missing or hidden; if it is hidden, `create_repo` fails
        api.create_repo(repo, private=private or None)
        return True
    if private and not info.private:
        raise HubError(f"{repo} already exists and is public: nothing was uploaded. Make it private first.")
    return not any(file.rfilename == "README.md" for file in info.siblings or ())


def explain_error(error: Exception, repo: str, endpoint: str) -> str:
    """Say what failed and what to do."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401 or type(error).__name__ == "LocalTokenNotFoundError":
        return f"{endpoint} requires authentication. Set HF_TOKEN to a token with write access."
    if status == 403:
        return f"{endpoint} does not let this token write to {repo}. Use a token with write access, or your own name."
    reason = str(error).strip().partition("\n")[0]
    return (
        f"Could not upload {repo} to {endpoint} ({type(error).__name__}: {reason}). "
        "The upload is one commit, so most likely nothing was published; run the command again to retry."
    )
