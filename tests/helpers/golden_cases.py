"""The golden cases of the shared data: original checkpoints with the outputs of the original code."""

import json
from typing import Any

from helpers.shared_data import shared_path
from patchword.checkpoints import Checkpoint, read_checkpoint

BARE = ("torchvision", "deit", "dinov2", "vit_pytorch")  # formats that do not store the number of heads
GOLDEN = shared_path("golden")
CASES = {path.parent.name: json.loads(path.read_text()) for path in sorted(GOLDEN.glob("*/case.json"))}
MODELS = [name for name, case in CASES.items() if "checkpoint" in case]


def overrides_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return the config fields that the file does not store."""
    fields: dict[str, Any] = {}
    if case["family"] in BARE or case["case"] == "timm_hybrid_r11":
        fields["num_heads"] = case["heads"]
    if "sincos" in case.get("pos_embed", ""):
        fields["image_size"] = tuple(case["image_size"])
    return fields


def read_case(name: str) -> Checkpoint:
    """Read the original checkpoint of a case."""
    return read_checkpoint(GOLDEN / name / CASES[name]["checkpoint"]["file"], **overrides_of(CASES[name]))
