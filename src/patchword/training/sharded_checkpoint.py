"""Writing a sharded checkpoint (format 2): every process writes its fraction of all tensors, as safetensors.

torch's distributed checkpoints (DCP) decide who writes which slice. Its safetensors writer is used instead of the
default, which contains pickles. `checkpoints/sharded_tensors.py` reads the files, in any number of processes.
"""

from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

from ..checkpoints.sharded_tensors import SHARD_PATTERN
from ..core.io import sha256, sync
from ..errors import CheckpointError
from .distributed import ProcessGroup


def write_shards(folder: Path, tensors: dict[str, Tensor], group: ProcessGroup) -> dict[str, str]:
    """Write this process's fraction of the tensors to an existing folder, together with all other processes.

    Returns:
        The SHA-256 of every file, by name.

    Raises:
        CheckpointError: A process could not write its file.
    """
    try:
        save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        reason = getattr(cause, "strerror", None) or cause
        raise CheckpointError(f"process {rank}: {reason}", code="checkpoint_not_saved") from None
    checksums: dict[str, str] = {}
    for result in group.all_gather(checksum_own_files(folder, group)):
        if isinstance(result, CheckpointError):
            raise result
        checksums |= result
    return checksums


def checksum_own_files(folder: Path, group: ProcessGroup) -> dict[str, str] | CheckpointError:
    """Sync this process's share of the files to disk, and return their checksums, or why that failed."""
    own = sorted(folder.glob(SHARD_PATTERN))[group.rank :: group.size]
    try:
        for path in own:
            sync(path)
        return {path.name: sha256(path) for path in own}
    except OSError as error:
        return CheckpointError(f"process {group.rank}: {error.strerror or error}", code="checkpoint_not_saved")
