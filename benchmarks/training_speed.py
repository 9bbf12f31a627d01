"""Training steps per second: patchword, transformers' Trainer and a plain loop around vit-pytorch, in the same run.

    python benchmarks/training_speed.py [--seconds 90]

All libraries train the same ViT on as many random images with AdamW and gradient clipping; the others get normalized
tensors, patchword starts from 8-bit pixels. If bf16 is faster on this machine, patchword and Trainer also run in bf16.
Each library has its own process, and they alternate every few steps. Writes results/training_speed.json.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from harness import Child, matmul_peak, write_result
from inference_fp32 import vit_pytorch_class
from torch.nn import functional as F

import patchword as pw
from patchword.config import Config, ProgressiveResizeConfig, ViTConfig
from patchword.recipes import load_recipe
from patchword.training.precision import resolve_precision

STEPS = 3  # per library and round; the first is not counted
SMALL = pw.preset("Ti/4", image_size=32, embed_dim=128, depth=6, num_heads=4, mlp_dim=512, num_classes=10)
RECIPE = load_recipe("cifar10_scratch")
RECIPE = RECIPE.replace(
    model=RECIPE.model.replace(num_classes=10), progressive_resize=ProgressiveResizeConfig()
)  # all steps at full size
SHAPES = {
    "S/16 at 224, batch 16": Config(model=pw.preset("S/16", num_classes=10), batch_size=16),
    "6x128/4 at 32, batch 256": Config(model=SMALL, batch_size=256),
    "recipe cifar10_scratch": RECIPE,
}


def flops(config: ViTConfig) -> int:
    """Count the FLOPs of the matmuls in one image's forward pass; a convolution counts as a matmul."""
    n, d, inner = config.num_patches + config.num_prefix, config.embed_dim, config.num_heads * config.attention_dim
    block = 2 * n * (4 * d * inner + 2 * d * config.mlp_dim) + 4 * n * n * inner
    patch = config.patch_size[0] * config.patch_size[1] * config.map_channels
    total = config.depth * block + 2 * config.num_patches * d * patch
    side, channels = config.image_size[0], config.in_channels
    for width in config.stem_layers if config.stem == "conv" else ():
        total += 2 * side * side * 9 * channels * width
        side, channels = side // 2, width
        total += (config.stem_convs - 1) * 2 * side * side * 9 * width * width
    return total


def patchword(run: Config) -> Callable[[], object]:
    from patchword.data.sources import DatasetSplits, from_arrays
    from patchword.training.allocator import retain_freed_memory
    from patchword.training.distributed import ProcessGroup
    from patchword.training.trainer import Trainer

    retain_freed_memory()
    count = 4 * run.batch_size
    pixels = np.random.default_rng(0).integers(0, 256, (count, *run.model.image_size, 3), dtype=np.uint8)
    source = from_arrays(pixels, np.arange(count) % run.model.num_classes)
    trainer = Trainer(run, DatasetSplits(source, source), ProcessGroup(), fresh=True)
    trainer.start_loader()
    return lambda: trainer.train_step(0.5)


def vit_pytorch(run: Config) -> Callable[[], object]:
    config = run.model
    model = vit_pytorch_class()(
        image_size=config.image_size[0], patch_size=config.patch_size[0], num_classes=config.num_classes,
        dim=config.embed_dim, depth=config.depth, heads=config.num_heads, mlp_dim=config.mlp_dim,
        dim_head=config.attention_dim,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    images = torch.randn(run.batch_size, 3, *config.image_size)
    labels = torch.arange(run.batch_size) % config.num_classes

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def transformers(run: Config) -> Callable[[], object]:
    from transformers import Trainer, TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification

    class Baton(TrainerCallback):
        """Makes a Trainer, which normally runs to its end, stop after each step until the next is requested."""

        def __init__(self) -> None:
            self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
            self.failure: BaseException | None = None

        def on_step_begin(self, *arguments: object, **more: object) -> None:
            self.go.acquire()

        def on_step_end(self, *arguments: object, **more: object) -> None:
            self.done.release()

        def step(self) -> None:
            self.go.release()
            self.done.acquire()
            if self.failure is not None:
                raise self.failure

        def run(self, trainer: Trainer) -> None:
            try:
                trainer.train()
            except BaseException as error:  # raised in `step`, which waits for it
                self.failure = error
            self.done.release()

    config, batch = run.model, run.batch_size
    their_config = ViTConfig(
        image_size=config.image_size[0], patch_size=config.patch_size[0], hidden_size=config.embed_dim,
        num_hidden_layers=config.depth, num_attention_heads=config.num_heads, intermediate_size=config.mlp_dim,
        num_labels=config.num_classes,
    )  # fmt: skip
    images = torch.randn(4 * batch, 3, *config.image_size)
    data = [{"pixel_values": x, "labels": i % config.num_classes} for i, x in enumerate(images)]
    settings = TrainingArguments(
        output_dir="unused", use_cpu=True, per_device_train_batch_size=batch, max_steps=10**6, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, bf16=run.precision == "bf16",
    )  # fmt: skip
    baton = Baton()
    trainer = Trainer(ViTForImageClassification(their_config), settings, train_dataset=data, callbacks=[baton])
    threading.Thread(target=baton.run, args=(trainer,), daemon=True).start()
    return baton.step


LIBRARIES = {"patchword": patchword, "transformers": transformers, "vit-pytorch": vit_pytorch}


BF16 = " in bf16"


def worker(name: str, run: Config, pipe: Connection) -> None:
    """Run a library's process: make a few steps per request, and reply with the seconds of a step."""
    step = LIBRARIES[name.removesuffix(BF16)](run.replace(precision="bf16" if name.endswith(BF16) else "fp32"))
    step()
    pipe.send(0.0)
    while pipe.recv():
        durations = []
        for _ in range(STEPS):
            start = time.perf_counter()
            step()
            durations.append(time.perf_counter() - start)
        pipe.send(statistics.median(durations[1:]))


def measure(title: str, run: Config, names: list[str], seconds: float) -> dict[str, Any]:
    children = {}
    for name in names:
        children[name] = Child(name, worker, name, run)
        children[name].receive()
    times: dict[str, list[float]] = {name: [] for name in names}
    start = time.perf_counter()
    while len(times[names[0]]) < 5 or time.perf_counter() - start < seconds:
        for name in names if len(times[names[0]]) % 2 == 0 else reversed(names):
            times[name].append(children[name].ask(True))
    for child in children.values():
        child.stop()
    return table(title, run, times)


def table(title: str, run: Config, times: dict[str, list[float]]) -> dict[str, Any]:
    peak, work = matmul_peak(), 3 * flops(run.model)
    row: dict[str, Any] = {"shape": title, "rounds": len(times["patchword"])}
    row |= {"matmul_peak_tflops": round(peak, 4), "gflop_per_image": round(work / 1e9, 3)}
    for name, durations in times.items():
        speed = run.batch_size / statistics.median(durations)
        fraction = work * speed / 1e12 / peak
        ratio = statistics.median(t / o for t, o in zip(durations, times["patchword"], strict=True))
        row[name] = {"images_per_second": round(speed, 2), "of_peak": round(fraction, 3), "we_are": round(ratio, 3)}
        print(f"{title:26} {name:20} {speed:9.2f} images/s  {fraction:6.1%} of peak  we are {ratio:.2f}x", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90.0, help="for each shape")
    seconds = parser.parse_args().seconds
    rows = []
    for title, run in SHAPES.items():
        names = ["patchword"] if run is RECIPE else list(LIBRARIES)  # the other libraries have no such stem
        if resolve_precision("auto", torch.device("cpu")) == "bf16":
            names += [name + BF16 for name in names if name != "vit-pytorch"]  # a plain loop without autocast
        rows.append(measure(title, run, names, seconds))
    print(write_result("training_speed", {"rows": rows}))


if __name__ == "__main__":
    main()
