"""The golden cases of the shared data: original checkpoints with the outputs of the original code."""

import json

from helpers.shared_data import shared_path
from patchword.checkpoints import Checkpoint, read_checkpoint

BARE = ("torchvision", "deit", "dinov2", "vit_pytorch")  # formats that do not say the number of heads
GOLDEN = shared_path("golden")
CASES = {path.parent.name: json.loads(path.read_text()) for path in sorted(GOLDEN.glob("*/case.json"))}
MODELS = [name for name, case in CASES.items() if "checkpoint" in case]


def given(case: dict) -> dict:
    """What the file itself does not say."""
    fields = {}
    if case["family"] in BARE or case["case"] == "timm_hybrid_r11":
        fields["num_heads"] = case["heads"]
    if "sincos" in case.get("pos_embed", ""):
        fields["image_size"] = tuple(case["image_size"])
    return fields


def read(name: str) -> Checkpoint:
    return read_checkpoint(GOLDEN / name / CASES[name]["checkpoint"]["file"], **given(CASES[name]))
