"""The golden cases of the shared data: original checkpoints with the outputs of the original code."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from helpers.shared_data import shared_path
from patchword.checkpoints import Checkpoint, read_checkpoint

BARE = ("torchvision", "deit", "dinov2", "vit_pytorch", "mae")  # do not store the number of heads
FOLDERS = (shared_path("golden"), shared_path("golden2"))
PATHS = {path.parent.name: path.parent for folder in FOLDERS for path in sorted(folder.glob("*/case.json"))}
CASES = {name: json.loads((path / "case.json").read_text()) for name, path in PATHS.items()}
MODELS = [name for name, case in CASES.items() if "checkpoint" in case]


def overrides_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return the config fields that the file does not store."""
    fields: dict[str, Any] = {}
    if case["family"] in BARE or case["case"] == "timm_hybrid_r11":
        fields["num_heads"] = case["heads"]
    if "sincos" in case.get("pos_embed", "") and case["family"] in ("big_vision", "vit_pytorch"):
        fields["image_size"] = tuple(case["image_size"])
    return fields


def checkpoint_path(name: str) -> Path:
    """Return the original file of a case, or its directory if the format is one."""
    file = PATHS[name] / CASES[name]["checkpoint"]["file"]
    return file


def read_case(name: str, **fields: Any) -> Checkpoint:
    """Read the original checkpoint of a case; `fields` are passed on."""
    return read_checkpoint(checkpoint_path(name), **{**overrides_of(CASES[name]), **fields})


def read_golden(name: str) -> dict[str, Tensor]:
    """Read the images of a case and the original outputs for them."""
    return load_file(PATHS[name] / "golden.safetensors")
