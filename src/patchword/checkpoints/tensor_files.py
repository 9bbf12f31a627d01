"""Reading and writing tensor files: .safetensors, .npz and .pth, without executing their content.

This module does not know about models. Every problem with a file becomes a CheckpointError that names it.
"""

import argparse
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..core.io import apply_umask
from ..core.runtime import memory_limit
from ..core.text import one_line
from ..errors import CheckpointError

Tensors = dict[str, Tensor]

TENSOR_SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".bin")
# A directory with no other files may be overwritten by another model.
MODEL_FILES = ("model.safetensors", "model.json", "config.json", "preprocessor_config.json")


def read_tensors(path: Path) -> tuple[Tensors, bool]:
    """Read all tensors of a file; also return whether they were wrapped as {"model": ...}."""
    if not path.is_file():
        raise CheckpointError(f"There is no file {path}.")
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is empty: the download or copy did not finish.")
    if path.suffix not in TENSOR_SUFFIXES:
        raise CheckpointError(f"{path} is not a checkpoint file ({', '.join(TENSOR_SUFFIXES)}).")
    wrapped = False
    try:
        if path.suffix == ".safetensors":
            tensors = load_file(path)
        elif path.suffix == ".npz":
            tensors = read_npz(path)
        else:
            tensors, wrapped = read_pth(path)
        check_finite(path, tensors)
    except CheckpointError:
        raise
    except Exception as error:  # readers of damaged files raise all kinds of errors
        raise CheckpointError(
            f"{path} cannot be read ({one_line(error)}). Is it complete? Download it again."
        ) from None
    if not tensors:
        raise CheckpointError(f"{path} contains no tensors.")
    return tensors, wrapped


def check_finite(path: Path, tensors: Tensors) -> None:
    """Raise a CheckpointError for NaN or infinity in float32, the dtype that models compute in."""
    invalid = [
        name for name, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t.float()).all())
    ]
    if invalid:
        raise CheckpointError(
            f"{path} contains NaN or infinity in {', '.join(invalid[:5])}: it is damaged, or training diverged."
        )


def read_npz(path: Path) -> Tensors:
    """Read the arrays of an .npz file without pickle; sizes are checked before memory is allocated."""
    tensors = {}
    with zipfile.ZipFile(path) as archive:
        members = [m for m in archive.infolist() if m.filename.endswith(".npy")]
        needed, memory = sum(m.file_size for m in members), memory_limit()
        if memory is not None and needed > memory:
            raise CheckpointError(f"{path} unpacks to {needed / 2**30:.0f} GiB, more than the memory of this machine.")
        for member in members:
            with archive.open(member) as file:
                tensors[member.filename.removesuffix(".npy")] = read_npy(file, member.file_size)
    return tensors


def read_npy(file: Any, size: int) -> Tensor:
    """Read one array; its header must agree with the size of its data."""
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read_header(file)
    count = int(np.prod([int(n) for n in shape], dtype=object))
    if dtype.hasobject or count * dtype.itemsize != size - file.tell():
        raise ValueError("an array's header does not fit its data")
    array = np.frombuffer(file.read(), dtype=dtype)
    array = array.reshape(shape, order="F" if fortran else "C")
    if dtype == np.dtype("V2"):  # how big_vision stores bfloat16
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array, order="C"))  # a copy: frombuffer is read-only


def read_pth(path: Path) -> tuple[Tensors, bool]:
    """Read a pickled state dict with `torch.load(weights_only=True)`, which refuses everything but plain data."""
    with path.open("rb") as file:
        if file.read(2) not in (b"PK", *(bytes([0x80, version]) for version in range(2, 6))):
            raise CheckpointError(f"{path} was not written by torch.save, despite its suffix.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about odd zip entries before it refuses them
        try:
            with torch.serialization.safe_globals([argparse.Namespace]):  # the options of a training script, plain data
                content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            unsafe = isinstance(error, pickle.UnpicklingError)  # raised for everything but plain data
            reason = "it contains Python objects" if unsafe else one_line(error)
            raise CheckpointError(
                f"{path} cannot be read ({reason}). Only plain tensors are loaded, because a pickle can run code; "
                "save only the state dict, preferably as .safetensors.",
                code="unsafe_pickle" if unsafe else None,
            ) from None
    wrapped = False
    for key in ("model", "state_dict", "teacher"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content, wrapped = content[key], True
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} contains a {type(content).__name__}, not a state dict.")
    tensors = {str(k): v for k, v in content.items() if isinstance(v, Tensor)}
    check_dense(path, tensors)
    return tensors, wrapped


def check_dense(path: Path, tensors: Tensors) -> None:
    """Refuse sparse, quantized and meta tensors, and expanded ones that need more memory than the file has bytes."""
    size = path.stat().st_size
    for name, t in tensors.items():
        dense = t.layout == torch.strided and not t.is_quantized and not t.is_nested and t.device.type == "cpu"
        if not dense or t.numel() * t.element_size() > size:
            raise CheckpointError(f"{path}: {name} is not a dense tensor whose values are all in the file.")


def write_tensors(path: Path, tensors: Tensors, *, wrapped: bool = False) -> None:
    """Write tensors in the format given by the suffix; `wrapped` stores a .pth as {"model": ...}."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    if path.suffix == ".safetensors":
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except SafetensorError as error:  # raised for a full disk
            raise OSError(str(error)) from None
        apply_umask(path)  # safetensors creates files that only their owner can read
    elif path.suffix == ".npz":
        np.savez(path, **{name: to_numpy(t) for name, t in tensors.items()})  # type: ignore[arg-type]
    else:
        torch.save({"model": tensors} if wrapped else tensors, path)


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Convert to NumPy; bfloat16, which NumPy lacks, becomes two-byte records."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view("V2")
    return tensor.numpy()
