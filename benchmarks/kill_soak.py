"""Training runs that are killed repeatedly and must end bit-identical to an uninterrupted run.

    .venv/bin/python benchmarks/kill_soak.py --kills 300         # about six minutes

Each run is a tiny ViT on digits with everything that has state (EMA, dropout, mixup, gradient accumulation). Two kinds
train from scratch, with AdamW or Muon; the third fine-tunes like the recipe `finetune`: a probed head, frozen lower
blocks, layer decay, progressive resizing and WiSE-FT. The process gets SIGKILL at random moments and in the middle of a
save, of an evaluation and of the end; then the run is resumed. Compared with an uninterrupted run: the bytes of the
model and the last checkpoint, and all metrics.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import sklearn.datasets
from harness import write_result

import patchword as pw

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.runs import ForkServer, final_state, leftovers, run_with_kills, start_or_resume, tiny_config, write_recipe
from patchword.config import Config, DataConfig, OptimConfig, ProgressiveResizeConfig

STEPS, INIT_STEPS = 140, 60
KINDS, WORKERS = ("adamw", "muon", "finetune"), (0, 2)


def make_config(kind: str, workers: int, folder: Path) -> Config:
    data = DataConfig(source="digits", num_workers=workers)
    if kind != "finetune":
        optim = OptimConfig(name=kind, lr=3e-3)  # type: ignore[arg-type]
        return tiny_config(steps=STEPS, optim=optim, data=data)
    return tiny_config(
        steps=STEPS,
        data=data,
        init=str(folder / "init"),
        head_init="probe",
        freeze=("first-third",),
        optim=OptimConfig(lr=1e-3, layer_decay=0.75),
        progressive_resize=ProgressiveResizeConfig(scale=0.5, fraction=0.6),
        wise_ft_alpha=0.5,
    )


def pretrain(folder: Path) -> None:
    """Train the weights that "finetune" starts from, on five classes of two digits: it needs a new head."""
    digits = sklearn.datasets.load_digits()
    pixels = (digits.images * 255 / 16).astype(np.uint8)[..., None]
    source = pw.from_arrays(pixels, digits.target // 2, labels=tuple("abcde"))
    base = tiny_config(steps=INIT_STEPS)
    config = base.replace(model=base.model.replace(depth=3))
    pw.train(config, folder / "init", splits=pw.DatasetSplits(source))


def reference_run(server: ForkServer, folder: Path, kind: str) -> dict[str, Any]:
    recipe = write_recipe(folder / f"{kind}.py", make_config(kind, 0, folder))
    child = start_or_resume(server, recipe, folder / kind)
    assert child.wait() == 0, child.output()
    return final_state(folder / kind, STEPS)


def draw_points(rng: random.Random) -> list[str | float]:
    """Draw points for kills: about half at random, the others during a save, an evaluation or the end."""
    middle = [rng.choice(["save", "evaluation", rng.uniform(0, 1), rng.uniform(0, 1)]) for _ in range(9)]
    return [*middle, "finish"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, total, rows = random.Random(args.seed), Counter[str](), []
    with tempfile.TemporaryDirectory() as name, ForkServer(Path(name)) as server:
        folder = Path(name)
        pretrain(folder)
        references = {kind: reference_run(server, folder, kind) for kind in KINDS}
        print(f"{'run':>4} {'kind':>10} {'workers':>8} {'kills':>6} {'seconds':>8}  end")
        while total.total() < args.kills:
            kind, workers = KINDS[len(rows) % 3], WORKERS[len(rows) // 3 % 2]
            run = folder / f"run{len(rows)}"
            recipe = write_recipe(folder / "recipe.py", make_config(kind, workers, folder))
            start = time.monotonic()
            kills = run_with_kills(server, recipe, run, draw_points(rng))
            same = final_state(run, STEPS) == references[kind] and not leftovers(run)
            total.update(kills)
            rows.append({"kind": kind, "workers": workers, "kills": len(kills), "identical": same})
            seconds, end = time.monotonic() - start, "identical" if same else "DIFFERENT"
            print(f"{len(rows):4} {kind:>10} {workers:8} {len(kills):6} {seconds:8.1f}  {end}", flush=True)
    good = sum(row["identical"] for row in rows)
    points = ", ".join(f"{count} {point}" for point, count in total.most_common())
    print(f"{total.total()} kills ({points}) in {len(rows)} runs; {good} of {len(rows)} runs ended bit-identically")
    content = {"kills": total.total(), "points": dict(total), "identical": good, "runs": rows, "seed": args.seed}
    print(write_result("kill_soak", content))
    sys.exit(good != len(rows))


if __name__ == "__main__":
    main()
