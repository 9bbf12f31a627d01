"""Tensor files in and out: .safetensors, .npz and .pth, never executing what they contain, never half written.

Knows nothing of models. Whatever is wrong with a file becomes a CheckpointError that names it.
"""

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
# A folder that holds nothing else may be overwritten by another model.
MODEL_FILES = ("model.safetensors", "model.json", "config.json", "preprocessor_config.json")


def read_tensors(path: Path) -> tuple[Tensors, bool]:
    """All tensors of a file, and whether they were wrapped as {"model": ...}."""
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
    except Exception as error:  # whatever a reader of a damaged file throws, the file is what is wrong
        raise CheckpointError(f"{path} cannot be read ({one_line(error)}). Is it complete? Fetch it again.") from None
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors.")
    return tensors, wrapped


def check_finite(path: Path, tensors: Tensors) -> None:
    """Refuses what is not finite in float32, in which models compute."""
    bad = [name for name, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t.float()).all())]
    if bad:
        raise CheckpointError(f"{path} holds NaN or infinity in {', '.join(bad[:5])}: the file or the training broke.")


def read_npz(path: Path) -> Tensors:
    """Arrays of an .npz, read without pickle; sizes are checked against the archive before memory is taken."""
    tensors = {}
    with zipfile.ZipFile(path) as archive:
        members = [m for m in archive.infolist() if m.filename.endswith(".npy")]
        needed, memory = sum(m.file_size for m in members), memory_limit()
        if memory is not None and needed > memory:
            raise CheckpointError(f"{path} unpacks to {needed / 2**30:.0f} GiB, more than this machine's memory.")
        for member in members:
            with archive.open(member) as file:
                tensors[member.filename.removesuffix(".npy")] = read_npy(file, member.file_size)
    return tensors


def read_npy(file: Any, size: int) -> Tensor:
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read_header(file)
    count = int(np.prod([int(n) for n in shape], dtype=object))
    if dtype.hasobject or count * dtype.itemsize != size - file.tell():
        raise ValueError("an array's header does not fit its data")
    array = np.frombuffer(file.read(), dtype=dtype)
    array = array.reshape(shape, order="F" if fortran else "C")
    if dtype == np.dtype("V2"):  # big_vision's way of storing bfloat16
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array, order="C"))  # a copy: frombuffer is read-only


def read_pth(path: Path) -> tuple[Tensors, bool]:
    """A pickled state dict, by torch's restricted reader only: anything but plain data is refused, never run."""
    with path.open("rb") as file:
        if file.read(2) not in (b"PK", *(bytes([0x80, version]) for version in range(2, 6))):
            raise CheckpointError(f"{path} is not a file that torch.save wrote, whatever its name says.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about odd zip entries before it refuses them
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            unsafe = isinstance(error, pickle.UnpicklingError)  # what torch raises for all but plain data
            reason = "it holds Python objects" if unsafe else one_line(error)
            raise CheckpointError(
                f"{path} cannot be read ({reason}). Only plain tensors are loaded, because a pickle can run code; "
                "save the state dict alone, best as .safetensors.",
                code="unsafe_pickle" if unsafe else None,
            ) from None
    wrapped = False
    for key in ("model", "state_dict", "teacher"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content, wrapped = content[key], True
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a state dict.")
    tensors = {str(k): v for k, v in content.items() if isinstance(v, Tensor)}
    check_plain(path, tensors)
    return tensors, wrapped


def check_plain(path: Path, tensors: Tensors) -> None:
    """Refuses sparse, quantised and meta tensors, and those that repeat a few numbers to fill the memory."""
    size = path.stat().st_size
    for name, t in tensors.items():
        dense = t.layout == torch.strided and not t.is_quantized and not t.is_nested and t.device.type == "cpu"
        if not dense or t.numel() * t.element_size() > size:
            raise CheckpointError(f"{path}: {name} is not a plain tensor whose numbers are all in the file.")


def write_tensors(path: Path, tensors: Tensors, *, wrapped: bool = False) -> None:
    """Writes in the format that the suffix names."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    if path.suffix == ".safetensors":
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except SafetensorError as error:  # which is what it makes of a full disk
            raise OSError(str(error)) from None
        apply_umask(path)  # safetensors makes files that only their owner can read
    elif path.suffix == ".npz":
        np.savez(path, **{name: to_numpy(t) for name, t in tensors.items()})  # type: ignore[arg-type]
    else:
        torch.save({"model": tensors} if wrapped else tensors, path)


def to_numpy(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view("V2")
    return tensor.numpy()
