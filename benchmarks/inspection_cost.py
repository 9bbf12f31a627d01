"""Time and memory of an inspection.

    python benchmarks/inspection_cost.py MODEL FOLDER

`patchword inspect MODEL FOLDER` with 64 images, the whole command; and the attention distance of all layers of a
B/16 at 384 pixels over 32 images, in its own process. Writes results/inspection_cost.json.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from harness import short_path, write_result

LARGE = """
import torch, patchword as pw
from patchword.inspection import measure_attention_distance
model = pw.optimize_for_cpu(pw.create_model("B/16", image_size=384, num_classes=1000)).eval()
torch.manual_seed(0)
result = measure_attention_distance(model, (torch.randn(4, 3, 384, 384) for _ in range(8)))
assert result.num_images == 32 and result.distance.shape == (12, 12)
"""


def measure(command: list[str]) -> dict[str, Any]:
    """Return wall-clock seconds and peak memory of a child process."""
    start = time.perf_counter()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, command
    return {"seconds": round(time.perf_counter() - start, 1), "peak_gib": round(usage.ru_maxrss / 2**20, 2)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "patchword", "inspect", args.model, args.folder, "--out", f"{folder}/seen"]
        costs = {f"inspect {short_path(args.model)}, 64 images": measure(command)}
    costs["attention distance of B/16 at 384, 32 images"] = measure([sys.executable, "-c", LARGE])
    for name, cost in costs.items():
        print(f"{name:50} {cost['seconds']:6.1f} s  {cost['peak_gib']:.2f} GiB")
    print(write_result("inspection_cost", {"command": "benchmarks/inspection_cost.py", **costs}))


if __name__ == "__main__":
    main()
