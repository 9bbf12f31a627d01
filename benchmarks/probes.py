"""Few-shot, k-nearest-neighbor and logistic probes of frozen features.

    python benchmarks/probes.py MODEL DATA [--seeds 10]

Runs `patchword probe`, prints its table and writes results/probes.json: test accuracy, with the spread over draws of
the shots.
"""

import argparse

from harness import short_path, write_result

from patchword.evaluation.probe import probe


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args()
    result = probe(args.model, args.data, seeds=args.seeds)
    for name, accuracy, spread in result.rows():
        print(f"{name:10} {accuracy:.2%}" + (f" +- {spread:.2%}" if spread is not None else ""))
    command = f"benchmarks/probes.py {short_path(args.model)} {short_path(args.data)} --seeds {args.seeds}"
    print(write_result("probes", {"command": command, **result.to_json()}))


if __name__ == "__main__":
    main()
