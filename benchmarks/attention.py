"""Does attention do the work in `cifar10_scratch`, or its convolutions? The recipe beside itself without attention.

    python benchmarks/attention.py [--minutes 10] [--seed 0]

"blind" is the same model and the same arithmetic, but each patch sees itself alone; "no blocks" is what stands before
them. One core each, two side by side, 5,000 pictures of the training part for validation; the test part has no say.
What results/attention.json has already is not run again. Writes results/attention.json. (attention_former.json has the
same of recipes/six_convolutions.py.)
"""

import argparse
import json
from typing import Any

from crossing import Key, side_by_side
from harness import COMMIT, RESULTS, write_result

ARMS = {
    "cifar10_scratch": [],
    "blind": ["--model.attention-pattern", "local", "--model.window-size", "1"],
    "no blocks": ["--model.depth", "0"],
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    path = RESULTS / "attention.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["arms"] if path.exists() else []

    def done(key: Key, found: dict[str, Any]) -> None:
        name, minutes, seed = key
        place = {"name": name, "minutes": minutes, "seed": seed, "commit": COMMIT}
        rows.append({**place, **{k: v for k, v in found.items() if k != "test"}})
        print(f"{name:20} {found['steps']:6} steps  val {found['val']:.2%}", flush=True)
        write_result("attention", {"val_pictures": 5000, "arms": rows})

    have = {(row["name"], row["minutes"], row["seed"]) for row in rows}
    recipe = ["cifar10_scratch", "--data.val-fraction", "0.1"]
    jobs = {(name, args.minutes, args.seed): [*recipe, *more] for name, more in ARMS.items()}
    side_by_side({key: arguments for key, arguments in jobs.items() if key not in have}, done)


if __name__ == "__main__":
    main()
