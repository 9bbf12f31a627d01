"""Reading the tensors of a sharded training checkpoint: safetensors files of several processes, each with slices.

torch's distributed checkpoints (DCP) know which file holds which slice, so that any number of processes can read what
any other number has written. That part of torch takes a second to import, so it is imported where it is used.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.io import read_json, sha256
from ..errors import CheckpointError
from ..models.lora import merge_lora

MANIFEST_FILE = "state.json"  # of a training checkpoint: written last, with the checksums of all files
SHARD_PATTERN = "shard-*.safetensors"


def is_sharded(folder: Path) -> bool:
    """Whether a directory is a sharded training checkpoint."""
    return (folder / MANIFEST_FILE).is_file() and next(folder.glob(SHARD_PATTERN), None) is not None


def read_evaluated_model(folder: Path) -> dict[str, Tensor]:
    """Read the tensors of the evaluated model of a sharded training checkpoint.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    manifest = read_json(folder / MANIFEST_FILE)
    for name, checksum in manifest.get("files", {}).items():
        path = folder / name
        if not path.is_file() or sha256(path) != checksum:
            raise CheckpointError(f"{path} is missing or damaged: its checksum is not that in {MANIFEST_FILE}.")
    return evaluated_model(read_whole(folder))


def evaluated_model(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the evaluated model among those of a training state: the EMA, if there is one."""
    prefix = "average." if any(name.startswith("average.") for name in tensors) else "weights."
    return merge_lora({name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)})


def _reader(folder: Path) -> Any:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    return HuggingFaceStorageReader(str(folder))


def tensor_shapes_in(folder: Path) -> dict[str, Tensor]:
    """Return the names, shapes and types of the tensors of a checkpoint, as meta tensors."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = _reader(folder).read_metadata().state_dict_metadata
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_shards(folder: Path, targets: dict[str, Tensor]) -> None:
    """Fill tensors, sharded or not, from a checkpoint, together with all other processes."""
    from torch.distributed.checkpoint.state_dict_loader import load

    load(targets, storage_reader=_reader(folder))


def read_whole(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint into the memory of this process alone."""
    tensors = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensor_shapes_in(folder).items()}
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is loaded in a single process
        load(tensors, storage_reader=_reader(folder), no_dist=True)
    return tensors
