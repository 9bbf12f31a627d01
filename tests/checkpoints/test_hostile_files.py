"""Damaged, inconsistent and malicious files: every reader returns a model or raises a PatchwordError.

No file is executed or takes gigabytes of memory, and a conversion that fails or is killed leaves no partial output. The
damage is random but reproducible (`derandomize`).
"""

import contextlib
import copy
import errno
import io
import json
import math
import os
import pickle
import re
import resource
import shutil
import struct
import subprocess
import sys
import time
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from patchword.checkpoints import Checkpoint, read_checkpoint, write_checkpoint
from patchword.checkpoints.tensor_files import TENSOR_SUFFIXES, read_tensors, write_tensors
from patchword.cli.main import main
from patchword.config import ResNetConfig, ViTConfig
from patchword.core import io as files
from patchword.data.preprocess import HALF, Preprocess
from patchword.errors import CheckpointError, ConfigError, ConversionError, OutputError, PatchwordError
from patchword.models import build_model

Tensors = dict[str, torch.Tensor]

SMALL = ViTConfig(image_size=16, patch_size=8, embed_dim=32, depth=1, num_heads=4, mlp_dim=64, num_classes=5)
HYBRID = SMALL.replace(stem="resnet", stem_layers=(1,), stem_width=32, patch_size=2)
DINO = SMALL.replace(layer_scale=1.0, num_classes=0)
REGISTERS = SMALL.replace(layer_scale=1.0, num_registers=2, pooling="class+average", pos_embed_prefix=1)
HEADS = {"num_heads": 4}  # not stored in bare files
MAX_SECONDS, MAX_BYTES = 120, 2**30  # far above what any machine needs


@dataclass(frozen=True)
class Format:
    """A checkpoint format and the name of its file or directory."""

    to: str
    out: str
    config: ViTConfig = SMALL


FORMATS = {
    "patchword": Format("patchword", "model"),
    "google": Format("google", "model.npz"),
    "google hybrid": Format("google", "model.npz", HYBRID),
    "big_vision": Format("big_vision", "model.npz"),
    "timm folder": Format("timm", "model"),
    "timm safetensors": Format("timm", "model.safetensors"),
    "timm pth": Format("timm", "model.pth"),
    "timm hybrid": Format("timm", "model.safetensors", HYBRID),
    "transformers": Format("transformers", "model"),
    "transformers dinov2": Format("transformers", "model", REGISTERS),
    "torchvision": Format("torchvision", "model.pth"),
    "deit": Format("deit", "model.pth"),
    "dinov2": Format("dinov2", "model.pth", DINO),
    "vit_pytorch": Format("", "model.pt"),
    "vit_pytorch legacy": Format("", "model.bin"),
}
FOREIGN = [name for name in FORMATS if name != "patchword"]
SIDECARS = [
    ("patchword", "model.json"),
    ("timm folder", "config.json"),
    ("transformers", "config.json"),
    ("transformers", "preprocessor_config.json"),
    ("transformers dinov2", "config.json"),
]


def fuzz(examples: int) -> settings:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=checks)


def checkpoint(config: Any = SMALL) -> Checkpoint:
    torch.manual_seed(0)
    state = {
        n: torch.randn_like(t) if t.is_floating_point() else t for n, t in build_model(config).state_dict().items()
    }
    preprocess = Preprocess(size=config.image_size, crop=0.9, mean=HALF, std=HALF)
    labels = tuple(f"label {i}" for i in range(config.num_classes)) or None
    return Checkpoint(config, state, preprocess, labels)


def vit_pytorch_tensors() -> Tensors:
    layer, patch = "transformer.layers.0", "to_patch_embedding"
    shapes = {"cls_token": (1, 1, 32), "pos_embedding": (1, 5, 32), f"{patch}.2.weight": (32, 192)}
    shapes |= {f"{layer}.0.to_qkv.weight": (96, 32), f"{layer}.0.to_out.0.weight": (32, 32)}
    shapes |= {f"{layer}.1.net.1.weight": (64, 32), f"{layer}.1.net.4.weight": (32, 64), "mlp_head.weight": (5, 32)}
    vectors = {f"{patch}.2.bias": 32, f"{layer}.0.to_out.0.bias": 32, "mlp_head.bias": 5}
    vectors |= {f"{layer}.1.net.1.bias": 64, f"{layer}.1.net.4.bias": 32}
    norms = {f"{patch}.1": 192, f"{patch}.3": 32, "transformer.norm": 32}
    norms |= {f"{layer}.0.norm": 32, f"{layer}.1.net.0": 32}
    vectors |= {f"{n}.{suffix}": size for n, size in norms.items() for suffix in ("weight", "bias")}
    return {n: torch.randn(s) for n, s in {**shapes, **{n: (size,) for n, size in vectors.items()}}.items()}


def write_original(folder: Path, name: str) -> Path:
    form = FORMATS[name]
    out = folder / form.out
    if form.to:
        write_checkpoint(out, checkpoint(form.config), form.to)
    else:
        torch.manual_seed(0)
        torch.save(vit_pytorch_tensors(), out, _use_new_zipfile_serialization="legacy" not in name)
    return out


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One intact checkpoint of every format."""
    root = tmp_path_factory.mktemp("originals")
    folders = {name: root / name.replace(" ", "_") for name in FORMATS}
    for folder in folders.values():
        folder.mkdir()
    return {name: write_original(folder, name) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module", autouse=True)
def bounded_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_BYTES


def tensor_file(path: Path) -> Path:
    return path / "model.safetensors" if path.is_dir() else path


def fresh_copy(original: Path, folder: Path) -> Path:
    """Make a copy to damage. The old one is deleted first, because loaded tensors may still be mapped to it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    copied = folder / original.name
    (shutil.copytree if original.is_dir() else shutil.copy)(original, copied)
    return copied


def replace_bytes(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def read_or_refuse(path: Path) -> Checkpoint | None:
    """Read a checkpoint and build its model; None after a PatchwordError that names the file."""
    started = time.monotonic()
    try:
        result = read_checkpoint(path, **HEADS)
    except PatchwordError as error:
        result, message = None, str(error)
    else:
        result.build_model()
        message = str(path)
    assert str(path) in message
    assert len(message) < 5000
    assert time.monotonic() - started < MAX_SECONDS
    return result


def assert_refused(path: Path, match: str | None = None) -> None:
    with pytest.raises(PatchwordError, match=match) as error:
        read_checkpoint(path, **HEADS)
    assert str(path) in str(error.value)


def test_originals_can_be_read(originals: dict[str, Path]) -> None:
    for name, path in originals.items():
        result = read_or_refuse(path)
        assert result is not None, name
        assert result.family == (FORMATS[name].to or "vit_pytorch"), name


# Bytes


def damaged(original: bytes) -> st.SearchStrategy[bytes]:
    """Truncated, with flipped bits, overwritten or extended bytes; most often in the headers."""
    size = len(original)
    offset = st.one_of(st.integers(0, min(600, size - 1)), st.integers(max(0, size - 3000), size - 1))
    offset = st.one_of(offset, st.integers(0, size - 1))

    def flipped(bits: list[tuple[int, int]]) -> bytes:
        content = bytearray(original)
        for index, bit in bits:
            content[index] ^= 1 << bit
        return bytes(content)

    return st.one_of(
        offset.map(lambda n: original[:n]),
        st.lists(st.tuples(offset, st.integers(0, 7)), min_size=1, max_size=8, unique=True).map(flipped),
        st.tuples(offset, st.binary(min_size=1, max_size=64)).map(
            lambda cut: original[: cut[0]] + cut[1] + original[cut[0] + len(cut[1]) :]
        ),
        st.binary(min_size=1, max_size=64).map(lambda more: original + more),
        st.binary(min_size=1, max_size=64).map(lambda more: more + original),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_bytes(name: str, originals: dict[str, Path], scratch: Path) -> None:
    original = tensor_file(originals[name]).read_bytes()
    path = fresh_copy(originals[name], scratch / "bytes")

    @fuzz(60)
    @given(damaged(original))
    def check(content: bytes) -> None:
        replace_bytes(tensor_file(path), content)
        found = read_or_refuse(path)
        assert name != "patchword" or found is None or content == original

    check()


@pytest.mark.parametrize("name", ["google", "timm safetensors", "timm pth", "vit_pytorch legacy"])
def test_wrong_suffix(name: str, originals: dict[str, Path], scratch: Path) -> None:
    original = originals[name].read_bytes()
    pickled = (".pth", ".pt", ".bin")
    same = pickled if originals[name].suffix in pickled else (originals[name].suffix,)
    for suffix in TENSOR_SUFFIXES:
        path = scratch / f"renamed{suffix}"
        path.write_bytes(original)
        assert (read_or_refuse(path) is not None) == (suffix in same)
        path.unlink()

    @fuzz(30)
    @given(damaged(original), st.sampled_from(TENSOR_SUFFIXES))
    def check(content: bytes, suffix: str) -> None:
        path = scratch / f"renamed{suffix}"
        path.write_bytes(content)
        read_or_refuse(path)
        path.unlink()

    check()


@fuzz(100)
@given(st.binary(max_size=300), st.sampled_from(TENSOR_SUFFIXES))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes, suffix: str) -> None:
    path = tmp_path_factory.getbasetemp() / f"any{suffix}"
    path.write_bytes(content)
    assert_refused(path)


# JSON files next to the tensors

NUMBERS = [0, -1, 1, 2, 3, 7, 16, 16384, 10**6, 10**9, 10**12, 10**400, 2**63, -(10**12), 0.5, 1e-320, 1e308, -0.0]
WORDS = ["", "sincos", "rotary", "relative", "none", "learned_2d", "local", "axial", "resnet", "conv", "vit", "swiglu"]
WORDS += ["average", "attention", "class+average", "deit", "dinov2", "avg", "map", "gelu", "\ud800", "\0", "nan", "5"]


def nested_list(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


JUNK = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.sampled_from(NUMBERS),
        st.sampled_from(WORDS),
        st.floats(),
        st.integers(),
        st.text(max_size=5),
        st.sampled_from([30, 200, 400]).map(nested_list),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def json_paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List the paths of all values inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, each in inner for found in [(*path, key), *json_paths(each, (*path, key))]]


@st.composite
def mutated(draw: Callable[..., Any], original: dict[str, Any]) -> Any:
    content = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from(json_paths(content) or [("new",)]))
        holder = content
        for key in parents:
            holder = holder[key]
        action = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
        if action == "remove" and isinstance(holder, dict):
            del holder[last]
        elif action == "add" and isinstance(holder, dict):
            holder[draw(st.text(max_size=5))] = draw(JUNK)
        else:
            holder[last] = draw(JUNK)
    return content


def json_bytes(content: Any) -> bytes:
    return json.dumps(content).encode()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sidecar"), SIDECARS)
def test_mutated_json(name: str, sidecar: str, originals: dict[str, Path], scratch: Path) -> None:
    path = fresh_copy(originals[name], scratch / "json")
    original = json.loads((path / sidecar).read_text())

    @fuzz(80)
    @given(mutated(original))
    def check(content: Any) -> None:
        (path / sidecar).write_bytes(json_bytes(content))
        found = read_or_refuse(path)
        if found is not None:  # a checkpoint that was read can be written
            shutil.rmtree(scratch / "again", ignore_errors=True)
            write_checkpoint(scratch / "again", found)
            assert read_or_refuse(scratch / "again") is not None

    check()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sidecar"), SIDECARS)
def test_not_a_json_object(name: str, sidecar: str, originals: dict[str, Path], scratch: Path) -> None:
    path = fresh_copy(originals[name], scratch / "json")
    original = (path / sidecar).read_bytes()
    wrong = [b"", b"[]", b"3", b"null", b'"x"', b"{", b"\xff\xfe{}", b"\x80", b'{"a": "\xff"}', original[:-9]]
    wrong += [b"[" * 100_000, b'{"a":' * 900 + b"1" + b"}" * 900, b'{"a": ' + b"9" * 10_000 + b"}", b"\0" * 100]
    wrong += [b'{"a":' * 100 + b"1" + b"}" * 100, b'{"a": "\\ud800"}']
    for content in wrong:
        (path / sidecar).write_bytes(content)
        assert_refused(path, match=re.escape(sidecar))

    @fuzz(30)
    @given(damaged(original))
    def check(content: bytes) -> None:
        (path / sidecar).write_bytes(content)
        read_or_refuse(path)

    check()


# No tensor shape depends on the image size.
FREE_OF_TABLES = SMALL.replace(pos_embed="none", patch_size=4, num_heads=2)
COMPUTED = [
    {"pos_embed": "sincos"},
    {"pos_embed": "rotary"},
    {"attention_pattern": "local"},
    {"attention_pattern": "axial"},
]
HUGE_VALUES = [("depth", 10**9), ("image_size", 10**9), ("image_size", 16384), ("image_size", [16, 16384 * 8])]
HUGE_VALUES += [("embed_dim", 10**9), ("num_registers", 10**9), ("num_classes", 10**12), ("mlp_dim", 10**12)]
HUGE_VALUES += [("stem_layers", [4096] * 8), ("stem_layers", [1] * 10**5), ("num_heads", 10**12), ("window", 10**12)]


@pytest.mark.parametrize("computed", COMPUTED, ids=str)
def test_huge_values_in_model_json(computed: dict[str, str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", checkpoint(FREE_OF_TABLES.replace(**computed)))
    document = json.loads((tmp_path / "model/model.json").read_text())
    for field, value in HUGE_VALUES:
        stem = {"stem": "resnet", "image_size": 2048} if field == "stem_layers" else {}
        content = {**document, "config": {**document["config"], **stem, field: value}}
        (tmp_path / "model/model.json").write_bytes(json_bytes(content))
        started = time.monotonic()
        with pytest.raises(CheckpointError, match=rf"model\.json: .*\b({field}|GiB)\b"):
            read_checkpoint(tmp_path / "model")
        assert time.monotonic() - started < MAX_SECONDS


def test_huge_values_in_model_json_of_a_resnet(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", checkpoint(ResNetConfig(image_size=32, layers=(1,), num_classes=2)))
    assert read_checkpoint(tmp_path / "model").config.layers == (1,)
    document = json.loads((tmp_path / "model/model.json").read_text())
    for layers in ([512] * 8, [10**12], [-1], [0], [], [1] * 10**5):
        content = {**document, "config": {**document["config"], "layers": layers}}
        (tmp_path / "model/model.json").write_bytes(json_bytes(content))
        with pytest.raises(CheckpointError, match=r"model\.json: .*\blayers\b"):
            read_checkpoint(tmp_path / "model")


@fuzz(60)
@given(st.one_of(JUNK, st.dictionaries(st.text(max_size=5), JUNK)))
def test_any_index_of_shards(tmp_path_factory: pytest.TempPathFactory, weight_map: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "shards"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors.index.json").write_bytes(json_bytes({"weight_map": weight_map}))
    assert_refused(folder)


# Tensors

HUGE_INDEX = ["²", "٣", "9" * 5000, "999999999", "4000", "-1", "01"]


def misshapen(tensor: torch.Tensor) -> list[torch.Tensor]:
    shapes = [(), (0,), (1,), (1, 1, 1, 1, 1), (0, 3, 0), (10**9, 0), (0, 10**9, 1), (1, 1, 10**9, 0), (2, 3, 4, 5)]
    shapes += [
        (1, 0, 32),
        (1, 1, 32),
        (1, 2, 32),
        (1, 3, 32),
        (1, 7, 32),
        (32, 0),
        (32, 3, 0, 8),
        (0, 0, 0, 0),
        (1024,),
    ]
    rest = [tensor[None], tensor.flatten(), tensor.flatten()[:-1]]
    return [torch.zeros(shape) for shape in shapes] + rest


def mistyped(tensor: torch.Tensor) -> list[torch.Tensor]:
    kinds = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.int8, torch.uint16)
    return [torch.ones_like(tensor, dtype=kind) for kind in kinds]


class TensorDict(dict[str, Any]):
    """Tensors whose repr shows shapes instead of values."""

    def __repr__(self) -> str:
        return str({name[:80]: (tuple(t.shape), t.dtype) for name, t in self.items()})


@st.composite
def rebuilt(draw: Callable[..., Any], original: Tensors) -> Tensors:
    """Tensors dropped, renamed, doubled, prefixed, misshapen or mistyped."""
    tensors = dict(original)
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(sorted(tensors)))
        change = draw(st.sampled_from(["drop", "rename", "index", "double", "prefix", "shape", "shape", "type"]))
        if change == "drop":
            del tensors[name]
        elif change == "rename":
            tensors[draw(st.sampled_from([name + ".x", name[1:], name.upper(), "é", "a/../../b"]))] = tensors.pop(name)
        elif change == "index":
            new = re.sub(r"\d+", lambda _: draw(st.sampled_from(HUGE_INDEX)), name, count=1)
            tensors[new] = tensors[name]  # the same if there is no index
        elif change == "double":
            tensors |= {"module." + n: t for n, t in tensors.items()}
        elif change == "prefix":
            tensors = {draw(st.sampled_from(["module.", "params/", "x."])) + n: t for n, t in tensors.items()}
        else:
            tensors[name] = draw(st.sampled_from((misshapen if change == "shape" else mistyped)(tensors[name])))
    return TensorDict({n: t.clone() for n, t in tensors.items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_rebuilt_tensors(name: str, originals: dict[str, Path], scratch: Path) -> None:
    path = fresh_copy(originals[name], scratch / "tensors")
    original, wrapped = read_tensors(tensor_file(originals[name]))

    @fuzz(80)
    @given(rebuilt(TensorDict(original)))
    def check(tensors: Tensors) -> None:
        tensor_file(path).unlink(missing_ok=True)
        write_tensors(tensor_file(path), tensors, wrapped=wrapped)
        sign(path)
        read_or_refuse(path)

    check()


def sign(path: Path) -> None:
    """Update the checksum, as an attacker would."""
    if (path / "model.json").is_file():
        document = json.loads((path / "model.json").read_text())
        content = {**document, "sha256": files.sha256(path / "model.safetensors")}
        (path / "model.json").write_bytes(json_bytes(content))


@pytest.mark.parametrize("name", FORMATS)
def test_dtypes(name: str, originals: dict[str, Path], tmp_path: Path) -> None:
    path = fresh_copy(originals[name], tmp_path / "model")
    original, wrapped = read_tensors(tensor_file(originals[name]))
    for kind in (torch.float16, torch.bfloat16, torch.float64):
        tensor_file(path).unlink()
        write_tensors(tensor_file(path), {n: t.to(kind) for n, t in original.items()}, wrapped=wrapped)
        sign(path)
        model = read_checkpoint(path, **HEADS).build_model()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    for kind in (torch.int64, torch.bool):
        tensor_file(path).unlink(missing_ok=True)
        write_tensors(tensor_file(path), {n: t.to(kind) for n, t in original.items()}, wrapped=wrapped)
        sign(path)
        assert_refused(path, match=rf" {re.escape(str(kind))}\b")


@pytest.mark.parametrize("name", FORMATS)
def test_not_finite(name: str, originals: dict[str, Path], tmp_path: Path) -> None:
    path = fresh_copy(originals[name], tmp_path / "model")
    original, wrapped = read_tensors(tensor_file(originals[name]))
    for i, changed in enumerate(original):
        value = (math.nan, math.inf, -math.inf, 1e300)[i % 4]
        bad = original[changed].to(torch.float64 if value == 1e300 else original[changed].dtype, copy=True)
        bad.view(-1)[-1] = value
        tensor_file(path).unlink(missing_ok=True)
        write_tensors(tensor_file(path), {**original, changed: bad}, wrapped=wrapped)
        sign(path)
        assert_refused(path, match=f"NaN .*{re.escape(changed)}")


def test_huge_stacked_blocks(tmp_path: Path) -> None:
    """big_vision may stack all blocks in one tensor: a billion empty blocks need no space in the file."""
    scanned = "params/Transformer/encoderblock/LayerNorm_0/scale"
    tensors = {
        "params/embedding/kernel": torch.ones(8, 8, 3, 32),
        "params/Transformer/encoder_norm/scale": torch.ones(32),
    }
    for shape in ((10**9, 0), (), (100_000,)):
        write_tensors(tmp_path / "model.npz", {**tensors, scanned: torch.zeros(shape)})
        assert read_or_refuse(tmp_path / "model.npz") is None


# .npz


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def write_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def header(shape: str, kind: str = "<f4") -> str:
    return f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}"


BAD_HEADERS = [header(f"({n},)") for n in (3, 10**12, 10**30, -1, True)]
BAD_HEADERS += [header("(-1, -2)"), header("(0, 10**9)"), header("(2.0,)"), header("2"), header("()")]
BAD_HEADERS += [
    header("(2,)", kind) for kind in ("|O", "<U1", "|S4", "|V4", "<M8[s]", "<c8", ">f4", "<f16", "|V0", "zz")
]
BAD_HEADERS += ["{}", "[]", "(" * 9000, "'" * 300, "__import__('os').getpid()"]


@pytest.mark.parametrize("text", BAD_HEADERS, ids=lambda text: text[:70])
def test_inconsistent_npy_header(text: str, originals: dict[str, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(originals["google"]) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    assert_refused(write_zip(tmp_path / "model.npz", {**members, "cls.npy": npy(text, bytes(8))}))


def test_unusual_archives(originals: dict[str, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(originals["google"]) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    good = members["cls.npy"]
    empty, one = write_zip(tmp_path / "empty.npz", {}), write_zip(tmp_path / "one.npz", {"../../x.npy": good})
    assert_refused(empty, match=r"empty\.npz .*tensors")
    assert_refused(one, match=r"one\.npz .*timm.*\.\./\.\./x")
    for name in ("/etc/passwd.npy", "..\\..\\x.npy", "a" * 60_000 + ".npy", ".npy", "é\n\x1b[31m.npy", "con.npy"):
        assert_refused(write_zip(tmp_path / "model.npz", {**members, name: good}), match="unexpected: ")
    assert_refused(write_zip(tmp_path / "model.npz", {**members, "cls.npy": b""}))
    assert_refused(write_zip(tmp_path / "model.npz", {**members, "cls.npy": good + b"\0"}))
    with_text = write_zip(tmp_path / "model.npz", {**members, "readme.txt": b"hello", "folder/": b""})
    assert read_or_refuse(with_text) is not None


def test_zip_bomb(originals: dict[str, Path], tmp_path: Path) -> None:
    """A member that declares a petabyte is refused before memory is allocated."""
    content = bytearray(originals["google"].read_bytes())
    at = content.rindex(b"PK\x01\x02")  # the last entry of the directory
    name_size, extra_size = struct.unpack_from("<HH", content, at + 28)
    assert not extra_size
    struct.pack_into("<I", content, at + 24, 0xFFFFFFFF)
    struct.pack_into("<H", content, at + 30, 12)
    end = at + 46 + name_size
    content[end:end] = struct.pack("<HHQ", 1, 8, 2**50)
    tail = content.rindex(b"PK\x05\x06")
    struct.pack_into("<I", content, tail + 12, struct.unpack_from("<I", content, tail + 12)[0] + 12)
    (tmp_path / "model.npz").write_bytes(content)
    assert_refused(tmp_path / "model.npz", match="1048576 GiB")


# .pth


def save(content: Any, path: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse tensors are in beta, quantized ones deprecated
        torch.save(content, path, **options)
    return path


def unusual_tensors() -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "sparse": torch.eye(32).to_sparse(),
            "sparse rows": torch.eye(32).to_sparse_csr(),
            "quantized": torch.quantize_per_tensor(torch.ones(32), 0.1, 0, torch.qint8),
            "meta": torch.empty(32, device="meta"),
            "one number for 40 GB": torch.ones(1).expand(10**10),
            "one number for 4 EB": torch.ones(1).expand(10**9, 10**9),
            "complex": torch.ones(32, dtype=torch.complex64),
            "float8": torch.ones(32).to(torch.float8_e5m2),
            "float8 of scales": torch.ones(32).to(torch.float8_e8m0fnu),
        }


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("kind", unusual_tensors())
def test_unusual_tensors(kind: str, legacy: bool, originals: dict[str, Path], tmp_path: Path) -> None:
    tensors, _ = read_tensors(originals["timm pth"])
    content = {**tensors, "norm.weight": unusual_tensors()[kind]}
    path = save(content, tmp_path / "model.pth", _use_new_zipfile_serialization=not legacy)
    assert read_or_refuse(path) is None or "float8" in kind
    if "float8" in kind:
        save_file({n: t.contiguous() for n, t in content.items()}, tmp_path / "model.safetensors")
        read_or_refuse(tmp_path / "model.safetensors")


CONTENTS = [[], 3, 2.5, None, "text", (1, 2), {}, [torch.ones(3)], torch.ones(3), {"model": []}, {"model": {}}]
CONTENTS += [{"model": {"model": {"model": {}}}}, {"a": {"b": torch.ones(3)}}, {1: torch.ones(3)}, OrderedDict(a=1)]
CONTENTS += [{"state_dict": {"x": 3}}, {(1, (2, 3)): torch.ones(1)}, {"model": torch.ones(3)}, {None: {}}, set()]


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: repr(content)[:50])
def test_not_a_state_dict(content: Any, tmp_path: Path) -> None:
    for legacy in (False, True):
        assert_refused(save(content, tmp_path / "model.pth", _use_new_zipfile_serialization=not legacy))


def test_parameters_and_tied_tensors_are_plain(originals: dict[str, Path], tmp_path: Path) -> None:
    tensors, _ = read_tensors(originals["timm pth"])
    parameters = {n: torch.nn.Parameter(t) for n, t in tensors.items()}
    parameters["norm.bias"] = parameters["norm.weight"]
    found = read_or_refuse(save(parameters, tmp_path / "model.pth"))
    assert found is not None
    for to in ("patchword", "timm", "transformers"):
        write_checkpoint(tmp_path / to, found, to)
    write_checkpoint(tmp_path / "model.npz", found, "google")


class Attack:
    """Its pickle calls a function when it is loaded."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


def attacks(canary: Path) -> dict[str, Attack]:
    return {
        "system": Attack(os.system, f"touch {canary}"),
        "exec": Attack(exec, f"open({str(canary)!r}, 'w').close()"),
        "eval": Attack(eval, f"open({str(canary)!r}, 'w')"),
        "open": Attack(open, str(canary), "w"),
        "mkdir": Attack(os.mkdir, str(canary)),
        "getattr": Attack(getattr, Attack(open, str(canary), "w"), "name"),
    }


def pickled(attack: Any, tensors: Tensors) -> dict[str, bytes]:
    """Serialize the attack in every way that a reader may take for a checkpoint."""
    contents = {"alone": attack, "among tensors": {**tensors, "x": attack}, "wrapped": {"model": {"x": attack}}}
    contents["as a name"] = {attack: torch.ones(1)}
    result = {f"pickle {n}": pickle.dumps(c, protocol=2) for n, c in contents.items() if n != "among tensors"}
    for legacy in (False, True):
        for name, content in contents.items():
            buffer = io.BytesIO()
            torch.save(content, buffer, _use_new_zipfile_serialization=not legacy)
            result[f"torch {name} {'legacy' if legacy else 'zip'}"] = buffer.getvalue()
    buffer = io.BytesIO()
    np.savez(buffer, cls=np.array([attack, None], dtype=object), **{n: t.numpy() for n, t in tensors.items()})  # type: ignore[arg-type]
    result["object array"] = buffer.getvalue()
    array = io.BytesIO()
    np.save(array, np.array([attack], dtype=object))
    result["bare object array"] = array.getvalue()
    return result


@pytest.mark.slow
@pytest.mark.parametrize("kind", attacks(Path()))
def test_pickles_are_never_executed(kind: str, originals: dict[str, Path], tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    tensors, _ = read_tensors(originals["timm pth"])
    for wrapping, content in pickled(attacks(canary)[kind], tensors).items():
        for suffix in TENSOR_SUFFIXES:
            path = tmp_path / f"model{suffix}"
            path.write_bytes(content)
            assert_refused(path)
            assert not canary.exists(), wrapping


@pytest.mark.parametrize("kind", attacks(Path()))
def test_attacks_work_with_plain_pickle(kind: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a file left open
        with contextlib.suppress(AttributeError):
            pickle.loads(pickle.dumps(attacks(tmp_path / "canary")[kind]))
    assert (tmp_path / "canary").exists()


# Writing


def listing(folder: Path) -> dict[str, bytes | None]:
    """Return all files, including hidden ones, with their content."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


UNSUPPORTED = [
    ("google", "out.npz", SMALL.replace(num_registers=2, pos_embed_prefix=1)),
    ("google", "out.npz", SMALL.replace(pos_embed="rotary", pos_embed_prefix=None)),
    ("big_vision", "out.npz", SMALL.replace(layer_scale=0.1)),
    ("timm", "out", SMALL.replace(pos_embed="sincos", pos_embed_prefix=None)),
    ("timm", "out.pth", SMALL.replace(post_norm=True)),
    ("transformers", "out", SMALL.replace(patch_norm=True)),
    ("torchvision", "out.pth", SMALL.replace(class_token=False, pooling="average")),
    ("deit", "out.pth", SMALL.replace(qk_norm=True)),
    ("dinov2", "out.pth", SMALL),
    ("google", "out.npz", ResNetConfig(image_size=32, layers=(1,), num_classes=2)),
    ("google", "out.pth", SMALL),
    ("unknown", "out", SMALL),
]


@pytest.mark.parametrize(
    ("to", "out", "config"), UNSUPPORTED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_unsupported_models(to: str, out: str, config: Any, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=to):
        write_checkpoint(tmp_path / out, checkpoint(config), to)
    assert listing(tmp_path) == {}


@pytest.mark.parametrize("name", ["file/out", "file/deeper/out", "a" * 300, "a" * 250, "a\0b", "file"])
def test_unwritable_paths(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("existing")
    before = listing(tmp_path)
    for to, suffix in (("patchword", ""), ("transformers", ""), ("google", ".npz")):
        if name != "file":
            with pytest.raises(OutputError, match=re.escape(str(tmp_path / name)[:200])) as error:
                write_checkpoint(tmp_path / (name + suffix), checkpoint(), to)
            assert error.value.code == "cannot_write"
        elif not suffix:
            with pytest.raises(OutputError, match=r"/file .*format") as error:
                write_checkpoint(tmp_path / name, checkpoint(), to, overwrite=True)
            assert error.value.code == "output_exists"
        assert listing(tmp_path) == before


@pytest.mark.parametrize("name", ["~no-such-user/model", "a" * 300, "a\0b", "", "missing"])
def test_unreadable_paths(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError):
        read_checkpoint(name)
    if name.startswith("~"):
        with pytest.raises(CheckpointError, match=name):
            write_checkpoint(name, checkpoint())


def test_file_name_that_is_not_unicode(originals: dict[str, Path], tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xffdel.npz"))
    shutil.copy(originals["google"], path)
    write_checkpoint(tmp_path / "out", read_checkpoint(path))
    assert read_checkpoint(tmp_path / "out").provenance["read_from"] == "m?del.npz"


WRITTEN = [name for name, form in FORMATS.items() if form.to]


@pytest.mark.parametrize("name", WRITTEN)
def test_existing_output_is_kept(name: str, originals: dict[str, Path], tmp_path: Path) -> None:
    fresh_copy(originals[name], tmp_path / "here")
    before = listing(tmp_path)
    form = FORMATS[name]
    with pytest.raises(OutputError) as error:
        write_checkpoint(tmp_path / "here" / form.out, checkpoint(form.config), form.to)
    assert error.value.code == "output_exists"
    assert listing(tmp_path) == before
    write_checkpoint(tmp_path / "here" / form.out, checkpoint(form.config), form.to, overwrite=True)
    assert listing(tmp_path).keys() == before.keys()


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Limit the size of files to `size` bytes, so that writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("existing", [False, True], ids=["new", "over another"])
def test_full_disk(name: str, existing: bool, originals: dict[str, Path], tmp_path: Path) -> None:
    form = FORMATS[name]
    fresh_copy(originals[name], tmp_path / "here")
    if not existing:
        fresh_copy(originals["google"], tmp_path / "here").rename(tmp_path / "here/unrelated")
    before, written = listing(tmp_path), checkpoint(form.config)
    for size in (0, 1, 1000, tensor_file(originals[name]).stat().st_size - 1):
        with full_disk(size), pytest.raises(OutputError) as error:
            write_checkpoint(tmp_path / "here" / form.out, written, form.to, overwrite=True)
        assert error.value.code == "cannot_write"
        assert str(tmp_path / "here" / form.out) in str(error.value)
        assert listing(tmp_path) == before
    write_checkpoint(tmp_path / "here" / form.out, written, form.to, overwrite=True)
    assert read_or_refuse(tmp_path / "here" / form.out) is not None


@pytest.mark.parametrize("name", ["patchword", "timm folder", "google", "deit"])
@pytest.mark.parametrize("step", ["sync", "replace"])
def test_failure_in_the_last_step(
    name: str, step: str, originals: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = FORMATS[name]
    fresh_copy(originals[name], tmp_path / "here")
    before, real = listing(tmp_path), os.replace

    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def replace(old: Path, new: Path) -> None:
        """Fail when the new output is renamed, after the old directory was moved."""
        if Path(old).parent.name.startswith(".") and Path(old).name == form.out:
            no_space()
        real(old, new)

    monkeypatch.setattr(files, "sync", no_space) if step == "sync" else monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OutputError, match=os.strerror(errno.ENOSPC)) as error:
        write_checkpoint(tmp_path / "here" / form.out, checkpoint(form.config), form.to, overwrite=True)
    assert error.value.code == "cannot_write"
    assert listing(tmp_path) == before


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from patchword.checkpoints import read_checkpoint, write_checkpoint
target, source, to = Path(sys.argv[1]), read_checkpoint(sys.argv[2]), sys.argv[3]
random.seed(0)
write_checkpoint(target, source, to)
leftovers = set()
rounds, deadline = 0, time.monotonic() + 300
while rounds < 15 or (len(leftovers) < 2 and time.monotonic() < deadline):  # a busy machine needs more of them
    rounds += 1
    pid = os.fork()
    if not pid:
        while True:
            write_checkpoint(target, source, to, overwrite=True)
    time.sleep(random.uniform(0.002, 0.06))
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL  # it did not fail by itself
    there = target.exists()
    assert there or target.suffix == ""  # a file is replaced in one step, a folder in two
    if there:
        again = read_checkpoint(target, num_heads=4).tensors
        assert all(torch.equal(t, again[n]) for n, t in source.tensors.items())
    leftovers.add(len([p for p in target.parent.iterdir() if p.name.startswith(".")]))
write_checkpoint(target, source, to, overwrite=True)
read_checkpoint(target, num_heads=4).build_model()
print(len(leftovers))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("to", "out"), [("patchword", "out"), ("google", "out.npz")])
def test_killed_while_converting(to: str, out: str, originals: dict[str, Path], tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "here" / out), str(originals["patchword"]), to]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 1  # some were killed during a write and left a temporary directory


@pytest.mark.parametrize("name", ["google", "timm folder", "torchvision", "patchword"])
def test_converting_a_damaged_file(
    name: str, originals: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fresh_copy(originals[name], tmp_path / "source")
    original = tensor_file(path).read_bytes()
    replace_bytes(tensor_file(path), original[: len(original) // 2])
    (tmp_path / "out").mkdir()
    with pytest.raises(SystemExit) as stop:
        main(["convert", str(path), str(tmp_path / "out/model"), "--to", "patchword", "--num-heads", "4"])
    printed = capsys.readouterr()
    assert stop.value.code == 2
    assert listing(tmp_path / "out") == {}
    assert printed.out == ""
    assert printed.err.startswith("patchword: ")
    assert str(path) in printed.err
    assert "Trace" not in printed.err


# Error messages


@pytest.mark.parametrize("name", FORMATS)
def test_tensors_are_named(name: str, originals: dict[str, Path], tmp_path: Path) -> None:
    path = fresh_copy(originals[name], tmp_path / "model")
    original, wrapped = read_tensors(tensor_file(originals[name]))

    def check(tensors: Tensors, match: str) -> None:
        tensor_file(path).unlink(missing_ok=True)
        write_tensors(tensor_file(path), tensors, wrapped=wrapped)
        sign(path)
        assert_refused(path, match=match)

    bias = next(n for n in reversed(original) if n.endswith("bias"))
    shown = re.escape(re.sub(r"^(params/|vit\.|dinov2_with_registers\.)", "", bias))  # without the family's prefix
    check({n: t for n, t in original.items() if n != bias}, shown)
    check({**original, "unknown.weight": torch.ones(2)}, r"unknown\.weight")
    check({**original, bias: torch.ones(7)}, shown + r".*\(7,\).*\(\d+,\)")


@pytest.mark.parametrize("name", ["timm pth", "timm safetensors", "torchvision", "deit", "dinov2", "vit_pytorch"])
def test_unknown_number_of_heads(name: str, originals: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match=r"num_heads.*--num-heads [\dN]") as error:
        read_checkpoint(originals[name])
    assert str(originals[name]) in str(error.value)
    for wrong in ("four", 0, -1, 3, 10**12, math.nan, [4], None):
        with pytest.raises((ConfigError, CheckpointError), match="heads"):
            read_checkpoint(originals[name], num_heads=wrong)
