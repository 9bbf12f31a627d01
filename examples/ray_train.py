"""Trains on a Ray cluster: `pw.train` in the workers of Ray Train, which sets RANK and WORLD_SIZE.

Command: python examples/ray_train.py [--workers 2] [--epochs 40] [--out runs/ray]
Needs: pip install 'ray[train]'; on several nodes, an --out that all of them see. If a worker fails, all start again, up
to three times, and resume from the last checkpoint.
"""

import argparse
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--out", type=Path, default=Path("runs/ray"), help="run directory")
args = parser.parse_args()


def train(options: dict) -> None:
    """Run in every worker. The batch and its images are the same for any number of workers."""
    import os

    import patchword as pw

    print(f"worker {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
    pw.train(pw.load_recipe("quickstart").replace(epochs=options["epochs"]), options["out"], resume="auto")


out = args.out.resolve()
TorchTrainer(
    train,
    train_loop_config={"epochs": args.epochs, "out": str(out)},
    scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=False),
    run_config=RunConfig(storage_path=str(out.parent), failure_config=FailureConfig(max_failures=3)),
).fit()
print(f"report: {out / 'report.html'}")
