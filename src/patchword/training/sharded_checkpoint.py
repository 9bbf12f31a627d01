"""Files of a sharded checkpoint (format 2): every process writes its fraction of all tensors, as safetensors.

torch's distributed checkpoints (DCP) decide who writes and reads which slice, so that any number of processes can read
what any other number has written. Its safetensors writer is used instead of the default, which contains pickles.
"""

import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..core.io import sha256, sync
from ..errors import CheckpointError
from .distributed import ProcessGroup

SHARD_PATTERN = "shard-*.safetensors"


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


def tensor_shapes_in(folder: Path) -> dict[str, Tensor]:
    """Return the names, shapes and types of the tensors of a checkpoint, as meta tensors."""
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_shards(folder: Path, targets: dict[str, Tensor]) -> None:
    """Fill tensors, sharded or not, from a checkpoint, together with all other processes."""
    load(targets, storage_reader=HuggingFaceStorageReader(str(folder)))


def read_whole(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint into the memory of this process alone."""
    tensors = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensor_shapes_in(folder).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is loaded in a single process
        load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return tensors
