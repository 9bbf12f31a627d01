"""Tensor files in and out: .safetensors, .npz and .pth, never executing what they contain, never half written.

Knows nothing of models. Whatever is wrong with a file becomes a CheckpointError that names it.
"""

import contextlib
import functools
import hashlib
import json
import os
import pickle
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import CheckpointError, PatchwordError

Tensors = dict[str, Tensor]

TENSOR_SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".bin")
MODEL_FILES = ("model.safetensors", "model.json", "config.json", "preprocessor_config.json")
MOST_NESTED = 32  # levels of a JSON file; no checkpoint's has more than five


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
        raise CheckpointError(f"{path} cannot be read ({describe(error)}). Is it complete? Fetch it again.") from None
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors.")
    return tensors, wrapped


def describe(error: Exception) -> str:
    """One line of an exception's text."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."


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
        needed, memory = sum(m.file_size for m in members), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > memory:
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
            reason = "it holds Python objects" if unsafe else describe(error)
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
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(0o666 & ~umask())  # safetensors makes files that only their owner can read
    elif path.suffix == ".npz":
        np.savez(path, **{name: to_numpy(t) for name, t in tensors.items()})  # type: ignore[arg-type]
    else:
        torch.save({"model": tensors} if wrapped else tensors, path)


@functools.cache
def umask() -> int:
    """What the process takes away from the rights of new files; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def to_numpy(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view("V2")
    return tensor.numpy()


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(content, ensure_ascii=False).encode()  # half a surrogate pair could be neither printed nor written
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({describe(error)}).") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    if nested(content) > MOST_NESTED:
        raise CheckpointError(f"{path} is nested more than {MOST_NESTED} levels deep.")
    return content


def nested(content: Any) -> int:
    """How many objects and lists of a JSON value lie inside each other."""
    depth, level = 0, [content]
    while level := [each for each in level if isinstance(each, dict | list)]:
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
        depth += 1
    return depth


def write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8", errors="replace")  # a file's name may be no valid text


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def atomic_output(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder beside `target`; what stands at `target.name` in it when all went well becomes `target`.

    A crash or a full disk leaves `target` as it was. So does a kill, but for the instant between the two renamings that
    overwrite a folder: then the old one is found in the temporary folder. Only a file, or a folder that holds nothing
    but a model, is ever overwritten.
    """
    try:
        target = target.resolve()
        if target.exists() and not overwrite:
            raise CheckpointError(f"{target} exists already. Choose another name, or add --overwrite (overwrite=True).")
        if target.is_dir() and (others := sorted(p.name for p in target.iterdir() if p.name not in MODEL_FILES)):
            raise CheckpointError(f"{target} holds other things, too ({', '.join(others[:3])}): it is not overwritten.")
        target.parent.mkdir(parents=True, exist_ok=True)
        workplace = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{target} cannot be written ({describe(error)}).") from None
    try:
        made = workplace / target.name
        yield made
        if target.exists() and target.is_dir() != made.is_dir():
            kind = "a folder" if target.is_dir() else "a file"
            raise CheckpointError(f"{target} is {kind}, which this format does not write: it is not overwritten.")
        for path in [made, *made.rglob("*")] if made.is_dir() else [made]:
            sync(path)
        put(made, target, workplace / "old", overwrite=overwrite)
    except PatchwordError:
        raise
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:  # torch reports a full disk as RuntimeError
        raise CheckpointError(f"{target} could not be written ({describe(error)}); nothing was changed.") from None
    finally:
        if target.exists() or not (workplace / "old").exists():  # never the only copy
            shutil.rmtree(workplace, ignore_errors=True)


def put(made: Path, target: Path, aside: Path, *, overwrite: bool) -> None:
    """Gives what was made its name. A folder cannot be replaced in one step: the old one moves aside first.

    Without `overwrite` a folder that has come into being meanwhile makes the renaming fail.
    """
    try:
        if overwrite and target.is_dir():
            os.replace(target, aside)
        os.replace(made, target)
    except BaseException:
        if aside.exists() and not target.exists():
            os.replace(aside, target)
        raise
    sync(target.parent)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
