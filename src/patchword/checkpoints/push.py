"""A model to a hub: the folder that `hf:owner/name` reads again, with its card as README.md."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import HubError
from .card import model_card, strip_paths
from .checkpoint import Checkpoint
from .hub import parse_reference, use_plain_http
from .model_dir import write_model_dir

if TYPE_CHECKING:
    from huggingface_hub import HfApi


def push_to_hub(checkpoint: Checkpoint, target: str, *, private: bool = False, endpoint: str | None = None) -> str:
    """Makes the repository if it is not there, and sends everything in one commit; returns its address.

    huggingface_hub sends: HF_TOKEN and HF_ENDPOINT work as documented there.
    """
    repo, revision = parse_reference(target)
    checkpoint = replace(checkpoint, provenance=strip_paths(checkpoint.provenance))
    from huggingface_hub import HfApi, constants

    endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
    use_plain_http(endpoint)
    api = HfApi(endpoint=endpoint)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        write_model_dir(folder, checkpoint)
        (folder / "README.md").write_text(
            model_card(checkpoint, repo.partition("/")[2], f"hf:{repo}"), encoding="utf-8"
        )
        try:
            if not prepared(api, repo, private):
                (folder / "README.md").unlink()  # somebody wrote one; a card that is generated is no reason to lose it
            api.upload_folder(
                repo_id=repo, folder_path=folder, revision=revision, commit_message="Upload with patchword"
            )
        except HubError:
            raise
        except Exception as error:  # the library lets through what its HTTP client or its parser raises
            raise HubError(refusal(error, repo, endpoint)) from error
    return f"{endpoint}/{repo}"


def prepared(api: "HfApi", repo: str, private: bool) -> bool:
    """The repository is there; whether it needs a card."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        there = api.model_info(repo)
    except RepositoryNotFoundError:  # not there, or hidden from us, which making it will tell
        api.create_repo(repo, private=private or None)
        return True
    if private and not there.private:
        raise HubError(f"{repo} is there already, and public: nothing was sent. Make it private first.")
    return not any(file.rfilename == "README.md" for file in there.siblings or ())


def refusal(error: Exception, repo: str, endpoint: str) -> str:
    """What went wrong, and what to do."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401 or type(error).__name__ == "LocalTokenNotFoundError":
        return f"{endpoint} does not know who you are. Set HF_TOKEN to a token of yours that may write."
    if status == 403:
        return f"{endpoint} does not let this token write to {repo}. Make one that may, or choose a name of yours."
    reason = str(error).strip().partition("\n")[0]
    said = f"Could not send {repo} to {endpoint} ({type(error).__name__}: {reason})."
    return f"{said} Nothing was published, unless the hub says otherwise; run the command again to try once more."
