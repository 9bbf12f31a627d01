"""A training run by the command a user would type, its figures kept in results/.

    python benchmarks/trained.py NAME -- cifar10_scratch --budget 10m
    python benchmarks/trained.py pets_finetune_5m -- pets/ --init WEIGHTS --budget 5m

Runs `patchword train ARGUMENTS --json` in a temporary folder, one seed, and writes results/NAME.json. Validation chose
the step; the test part was measured once.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import write_result


def main() -> None:
    name, dashes, *arguments = sys.argv[1:]
    assert dashes == "--", __doc__
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "patchword", "train", *arguments, "--out", f"{folder}/run", "--json"]
        start = time.perf_counter()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        seconds = time.perf_counter() - start
        said = json.loads(done.stdout)
        config = json.loads(Path(folder, "run/config.json").read_text())["config"]
        rows = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    speeds = sorted(row["images_per_second"] for row in rows if row["kind"] == "train")
    public = [a if not Path(a).is_absolute() else Path(a).name for a in arguments]
    content = {"command": f"patchword train {' '.join(public)}", "seeds": 1, "command_seconds": round(seconds, 1)}
    content |= {part: said[part] for part in ("val", "test") if part in said}
    content |= {"steps": said["steps"], "images_per_second": speeds[len(speeds) // 2], "config": config}
    content["config"]["data"]["source"] = Path(config["data"]["source"]).name
    content["config"]["init"] = Path(config["init"]).name if config["init"] else None
    print(write_result(name, content))


if __name__ == "__main__":
    main()
