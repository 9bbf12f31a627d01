"""Few-shot, nearest-neighbour and logistic probes of frozen features.

    python benchmarks/probes.py MODEL DATA [--seeds 10]

`patchword probe`, its table printed and written to results/probes.json: accuracy on the test part, with the spread over
draws of the shots.
"""

import argparse

from harness import shown, write_result

from patchword.evaluation.probe import probe


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args()
    found = probe(args.model, args.data, seeds=args.seeds)
    for name, accuracy, spread in found.rows():
        print(f"{name:10} {accuracy:.2%}" + (f" +- {spread:.2%}" if spread is not None else ""))
    command = f"benchmarks/probes.py {shown(args.model)} {shown(args.data)} --seeds {args.seeds}"
    print(write_result("probes", {"command": command, **found.to_json()}))


if __name__ == "__main__":
    main()
