"""Beyond one machine: training in several processes, large prediction jobs on Ray, object stores, and the index.

    .venv/bin/python benchmarks/scale.py MODEL IMAGES                         # all parts, alone on the machine
    .venv/bin/python benchmarks/scale.py MODEL IMAGES --parts network index

MODEL is a ViT-Ti/16, IMAGES a folder of photos. Each part replaces its own entry of results/scale.json.
"""

import argparse
import json
from pathlib import Path

import scale_index
import scale_predict
import scale_training
from harness import provenance, write_result

RESULT = Path(__file__).parents[1] / "results/scale.json"
PARTS = ("ray", "storage", "network", "index", "processes", "memory", "faults")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("images", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    jobs = (args.model, args.images, args.rounds)
    measures = {
        "ray": lambda: scale_predict.measure(scale_predict.measure_ray, *jobs),
        "storage": lambda: scale_predict.measure(scale_predict.measure_storage, *jobs),
        "network": lambda: {"table": scale_training.measure_network(args.rounds)},
        "index": scale_index.measure,
        "processes": lambda: scale_training.measure_processes(args.kills),
        "memory": lambda: {"table": scale_training.measure_memory()},
        "faults": lambda: {
            "cluster": scale_predict.rounds_of_faults(args.kills),
            "storage": scale_predict.rounds_of_storage_faults(args.rounds),
        },
    }
    for part in args.parts:
        document = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        measured = {name: document[name] for name in PARTS if name in document}
        measured[part] = {**provenance(), **measures[part]()}
        print(write_result("scale", {"command": "benchmarks/scale.py", **measured}))


if __name__ == "__main__":
    main()
