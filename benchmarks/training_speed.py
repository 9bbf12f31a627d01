"""Training steps per second: patchword, transformers' Trainer and a plain loop around vit-pytorch, in the same run.

    python benchmarks/training_speed.py [--seconds 120]

The same ViT, the same random pictures, AdamW and gradient clipping everywhere; the peers get tensors that are
normalised already, we start from 8-bit pixels. Rounds of a few steps alternate. Writes results/training_speed.json.
"""

import argparse
import itertools
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np
import torch
from harness import matmul_peak, write_result
from inference_fp32 import vit_pytorch_class
from torch.nn import functional as F
from transformers import Trainer as PeerTrainer
from transformers import TrainerCallback, TrainingArguments, ViTForImageClassification
from transformers import ViTConfig as PeerConfig

import patchword as pw
from patchword.config import Config, ViTConfig
from patchword.data.sources import Parts, from_arrays
from patchword.recipes import load_recipe
from patchword.training.memory import keep_memory
from patchword.training.trainer import Trainer
from patchword.training.world import World

STEPS = 3  # of each library in a round; the first is not counted
SMALL = ViTConfig(
    image_size=(32, 32), patch_size=(4, 4), embed_dim=128, depth=6, num_heads=4, mlp_dim=512, num_classes=10
)
SHAPES = {"S/16 at 224, batch 16": (pw.preset("S/16", num_classes=10), 16), "6x128/4 at 32, batch 256": (SMALL, 256)}


def flops(config: ViTConfig) -> int:
    """Of the matrix products of one picture's forward pass; a convolution of the stem counts as the product it is."""
    n, d, inner = config.num_patches + config.num_prefix, config.embed_dim, config.num_heads * config.attention_dim
    block = 2 * n * (4 * d * inner + 2 * d * config.mlp_dim) + 4 * n * n * inner
    patch = config.patch_size[0] * config.patch_size[1] * config.map_channels
    total = config.depth * block + 2 * config.num_patches * d * patch
    if config.stem == "conv":
        side, channels = config.image_size[0], config.in_channels
        for width in config.stem_layers:
            total += 2 * side * side * 9 * channels * width
            side, channels = side // 2, width
    return total


def pictures(config: ViTConfig, count: int) -> Parts:
    pixels = np.random.default_rng(0).integers(0, 256, (count, *config.image_size, 3), dtype=np.uint8)
    source = from_arrays(pixels, np.arange(count) % config.num_classes)
    return Parts(source, source)


def ours(run: Config, parts: Parts) -> Callable[[], object]:
    trainer = Trainer(run, parts, World(), fresh=True)
    trainer.begin()
    return lambda: trainer.advance(0.5)


def plain_loop(config: ViTConfig, batch: int) -> Callable[[], object]:
    model = vit_pytorch_class()(
        image_size=config.image_size[0], patch_size=config.patch_size[0], num_classes=config.num_classes,
        dim=config.embed_dim, depth=config.depth, heads=config.num_heads, mlp_dim=config.mlp_dim,
        dim_head=config.attention_dim,
    )  # fmt: skip
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    images, labels = torch.randn(batch, 3, *config.image_size), torch.arange(batch) % config.num_classes

    def step() -> None:
        optimiser.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()

    return step


class Baton(TrainerCallback):
    """Lets a Trainer, which wants to run to its end, run on a thread of its own and make a step when asked."""

    def __init__(self) -> None:
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)

    def on_step_begin(self, *arguments: object, **more: object) -> None:
        self.go.acquire()

    def on_step_end(self, *arguments: object, **more: object) -> None:
        self.done.release()

    def step(self) -> None:
        self.go.release()
        self.done.acquire()


def peer_trainer(config: ViTConfig, batch: int) -> Callable[[], object]:
    peer = PeerConfig(
        image_size=config.image_size[0], patch_size=config.patch_size[0], hidden_size=config.embed_dim,
        num_hidden_layers=config.depth, num_attention_heads=config.num_heads, intermediate_size=config.mlp_dim,
        num_labels=config.num_classes,
    )  # fmt: skip
    images = torch.randn(batch * 4, 3, *config.image_size)
    data = [{"pixel_values": x, "labels": i % config.num_classes} for i, x in enumerate(images)]
    settings = TrainingArguments(
        output_dir="unused", use_cpu=True, per_device_train_batch_size=batch, max_steps=10**6, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    baton = Baton()
    trainer = PeerTrainer(ViTForImageClassification(peer), settings, train_dataset=data, callbacks=[baton])
    threading.Thread(target=trainer.train, daemon=True).start()
    return baton.step


def rounds(jobs: dict[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Seconds of a step of each job, a median for each round."""
    for job in jobs.values():
        job()
    times: dict[str, list[float]] = {name: [] for name in jobs}
    begin = time.perf_counter()
    for number in itertools.count():
        if number >= 5 and time.perf_counter() - begin > seconds:
            return times
        for name in list(jobs) if number % 2 == 0 else reversed(jobs):
            taken = []
            for _ in range(STEPS):
                start = time.perf_counter()
                jobs[name]()
                taken.append(time.perf_counter() - start)
            times[name].append(statistics.median(taken[1:]))
    raise AssertionError


def measure(title: str, jobs: dict[str, Callable[[], object]], config: ViTConfig, batch: int, seconds: float) -> dict:
    times, peak = rounds(jobs, seconds), matmul_peak()
    row = {"shape": title, "matmul_peak_tflops": round(peak, 4), "gflop_per_image": round(3 * flops(config) / 1e9, 3)}
    for name, taken in times.items():
        speed = batch / statistics.median(taken)
        row[name] = {"images_per_second": round(speed, 2), "of_peak": round(3 * flops(config) * speed / 1e12 / peak, 3)}
        row[name]["ratio"] = round(statistics.median(t / o for t, o in zip(taken, times["patchword"], strict=True)), 3)
        print(
            f"{title:28} {name:14} {speed:9.2f} images/s {row[name]['of_peak']:7.1%} of peak  {row[name]['ratio']:.2f}"
        )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="for each shape")
    seconds = parser.parse_args().seconds
    keep_memory()
    rows = []
    for title, (config, batch) in SHAPES.items():
        run = Config(model=config, batch_size=batch)
        jobs = {"patchword": ours(run, pictures(config, 4 * batch)), "transformers": peer_trainer(config, batch)}
        jobs["vit-pytorch"] = plain_loop(config, batch)
        rows.append(measure(title, jobs, config, batch, seconds))
    recipe = load_recipe("cifar10_scratch")
    config = recipe.model.replace(num_classes=10)
    jobs = {"patchword": ours(recipe, pictures(config, 4 * recipe.batch_size))}
    rows.append(measure("the recipe cifar10_scratch", jobs, config, recipe.batch_size, seconds / 4))
    print(write_result("training_speed", {"rows": rows}))


if __name__ == "__main__":
    main()
