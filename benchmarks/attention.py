"""Does attention do the work in `cifar10_scratch`, or its convolutions? An ablation of the recipe.

    python benchmarks/attention.py [--minutes 10] [--seed 0]

"blind" is the same model and the same arithmetic, but each patch attends only to itself; "no blocks" is the stem alone.
One core each, two in parallel, 5,000 images of the training set for validation; the test set is not used. Runs that are
already in results/attention.json are skipped. Writes results/attention.json. (attention_former.json has the same
ablation of recipes/six_convolutions.py.)
"""

import argparse
import json
from typing import Any

from crossing import RunKey, run_in_parallel
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

    def record(key: RunKey, result: dict[str, Any]) -> None:
        name, minutes, seed = key
        run = {"name": name, "minutes": minutes, "seed": seed, "commit": COMMIT}
        rows.append({**run, **{k: v for k, v in result.items() if k != "test"}})
        print(f"{name:20} {result['steps']:6} steps  val {result['val']:.2%}", flush=True)
        write_result("attention", {"num_val_images": 5000, "arms": rows})

    finished = {(row["name"], row["minutes"], row["seed"]) for row in rows}
    recipe = ["cifar10_scratch", "--data.val-fraction", "0.1"]
    jobs = {(name, args.minutes, args.seed): [*recipe, *more] for name, more in ARMS.items()}
    run_in_parallel({key: arguments for key, arguments in jobs.items() if key not in finished}, record)


if __name__ == "__main__":
    main()
