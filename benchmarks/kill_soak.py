"""Training runs that are killed repeatedly and must end bit-identical to an uninterrupted run.

    .venv/bin/python benchmarks/kill_soak.py --kills 200         # about four minutes

Each run is a tiny ViT on digits with everything that has state (EMA, dropout, mixup, gradient accumulation, AdamW or
Muon). Its process gets SIGKILL at random moments and in the middle of a save, of an evaluation and of the end; then the
run is resumed. Compared with an uninterrupted run: the bytes of the model and the last checkpoint, and all metrics.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness import write_result

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.runs import ForkServer, final_state, leftovers, run_with_kills, start_or_resume, tiny_config, write_recipe
from patchword.config import Config, DataConfig, OptimConfig

STEPS = 140
OPTIMIZERS, WORKERS = ("adamw", "muon"), (0, 2)


def make_config(optimizer: str, workers: int) -> Config:
    optim = OptimConfig(name=optimizer, lr=3e-3)  # type: ignore[arg-type]
    return tiny_config(steps=STEPS, optim=optim, data=DataConfig(source="digits", num_workers=workers))


def reference_run(server: ForkServer, folder: Path, optimizer: str) -> dict[str, Any]:
    recipe = write_recipe(folder / f"{optimizer}.py", make_config(optimizer, 0))
    child = start_or_resume(server, recipe, folder / optimizer)
    assert child.wait() == 0, child.output()
    return final_state(folder / optimizer, STEPS)


def draw_points(rng: random.Random) -> list[str | float]:
    """Draw points for kills: about half at random, the others during a save, an evaluation or the end."""
    middle = [rng.choice(["save", "evaluation", rng.uniform(0, 1), rng.uniform(0, 1)]) for _ in range(9)]
    return [*middle, "finish"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, total, rows = random.Random(args.seed), Counter[str](), []
    with tempfile.TemporaryDirectory() as name, ForkServer(Path(name)) as server:
        folder = Path(name)
        references = {optimizer: reference_run(server, folder, optimizer) for optimizer in OPTIMIZERS}
        print(f"{'run':>4} {'optimizer':>10} {'workers':>8} {'kills':>6} {'seconds':>8}  end")
        while total.total() < args.kills:
            optimizer, workers = OPTIMIZERS[len(rows) % 2], WORKERS[len(rows) // 2 % 2]
            run = folder / f"run{len(rows)}"
            recipe = write_recipe(folder / "recipe.py", make_config(optimizer, workers))
            start = time.monotonic()
            kills = run_with_kills(server, recipe, run, draw_points(rng))
            same = final_state(run, STEPS) == references[optimizer] and not leftovers(run)
            total.update(kills)
            rows.append({"optimizer": optimizer, "workers": workers, "kills": len(kills), "identical": same})
            seconds, end = time.monotonic() - start, "identical" if same else "DIFFERENT"
            print(f"{len(rows):4} {optimizer:>10} {workers:8} {len(kills):6} {seconds:8.1f}  {end}", flush=True)
    good = sum(row["identical"] for row in rows)
    kinds = ", ".join(f"{count} {kind}" for kind, count in total.most_common())
    print(f"{total.total()} kills ({kinds}) in {len(rows)} runs; {good} of {len(rows)} runs ended bit-identically")
    content = {"kills": total.total(), "kinds": dict(total), "identical": good, "runs": rows, "seed": args.seed}
    print(write_result("kill_soak", content))
    sys.exit(good != len(rows))


if __name__ == "__main__":
    main()
