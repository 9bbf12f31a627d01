"""Does attention do the work in `cifar10_scratch`, or its convolutions? The recipe beside itself without attention.

    python benchmarks/attention.py [--minutes 10] [--seed 0]

"blind" is the same model and the same arithmetic, but each patch sees itself alone. "convolutions" has no blocks at
all; "wide convolutions" has none either and spends their time on wider stages. One core each, two side by side, 5,000
pictures of the training part for validation; the test part has no say. Writes results/attention.json.
"""

import argparse
from typing import Any

from crossing import Key, side_by_side
from harness import write_result

BLIND = ["--model.attention", "local", "--model.window", "1"]
NO_BLOCKS = ["--model.depth", "0"]
ARMS = {
    "cifar10_scratch": [],
    "blind": BLIND,
    "convolutions": NO_BLOCKS,
    "wide convolutions": [*NO_BLOCKS, "--model.stem_layers", "64", "160", "256", "--model.embed_dim", "256"],
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def done(key: Key, found: dict[str, Any]) -> None:
        row = {"name": key[0], **{k: v for k, v in found.items() if k != "test"}}
        rows.append(row)
        print(f"{row['name']:20} {row['steps']:6} steps  val {row['val']:.2%}", flush=True)
        write_result("attention", {"minutes": args.minutes, "seed": args.seed, "val_pictures": 5000, "arms": rows})

    recipe = ["cifar10_scratch", "--data.val_fraction", "0.1"]
    side_by_side({(n, args.minutes, args.seed): [*recipe, *more] for n, more in ARMS.items()}, done)


if __name__ == "__main__":
    main()
