"""The server under load, over real sockets.

    python benchmarks/serve_load.py MODEL FOLDER [--seconds 60] [--clients 32]

Thirty-two clients send JPEG files one after the other, each waiting for its response. The baselines are the model alone
on decoded images, minus the cost of decoding, and the same server without batching. Every response is compared with the
classifier's own prediction. Writes results/serve_load.json.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from harness import short_path, write_result

from patchword.data.image_decoder import list_images
from patchword.inference.classifier import Classifier

NUM_IMAGES = 200
WARM_UP = 5.0  # seconds that are not counted


class RunningServer:
    """`patchword serve` in a child process, ready for requests."""

    def __init__(self, model: str, *options: str) -> None:
        command = [sys.executable, "-m", "patchword", "serve", model, "--port", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr
        lines: list[str] = []
        for line in self.process.stderr:
            lines.append(line)
            if '"ready"' in line:
                host, _, port = json.loads(line)["url"].removeprefix("http://").partition(":")
                self.address = host, int(port)
                break
        else:
            sys.exit(f"The server ended with code {self.process.wait()} before it was ready.\n{''.join(lines)}")
        self.drain = subprocess.Popen(["cat"], stdin=self.process.stderr, stdout=subprocess.DEVNULL)

    def memory(self) -> int:
        """Return the resident memory of the server and its children in MiB."""
        pids = [self.process.pid]
        for pid in pids:
            children = Path(f"/proc/{pid}/task/{pid}/children")
            pids += [int(child) for child in children.read_text().split()] if children.exists() else []
        lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
        return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) // 1024

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.drain.wait()


async def client(address: tuple[str, int], requests: list[bytes], first: int, until: float, seen: list[Any]) -> None:
    """Send requests over one connection; record (start, end, image, status, class index) of each."""
    reader, writer = await asyncio.open_connection(*address)
    number = first
    while time.perf_counter() < until:
        image = number % len(requests)
        start = time.perf_counter()
        writer.write(requests[image])
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(re.search(r"content-length: (\d+)", head)[1])  # type: ignore[index]
        body = json.loads(await reader.readexactly(length))
        index = body["results"][0]["predictions"][0]["index"] if "results" in body else None
        seen.append((start, time.perf_counter(), image, int(head.split()[1]), index))
        number += 7
    writer.close()


def load(model: str, requests: list[bytes], seconds: float, clients: int, *options: str) -> dict[str, Any]:
    server = RunningServer(model, *options)
    seen: list[Any] = []
    memory: list[int] = []

    async def all_clients() -> None:
        begin = time.perf_counter()
        until = begin + WARM_UP + seconds
        jobs = [client(server.address, requests, i * 13, until, seen) for i in range(clients)]

        async def watch() -> None:
            while time.perf_counter() < until:
                await asyncio.sleep(seconds / 12)
                memory.append(server.memory())

        await asyncio.gather(*jobs, watch())

    begin = time.perf_counter()
    asyncio.run(all_clients())
    server.stop()
    counted = [each for each in seen if begin + WARM_UP <= each[1] <= begin + WARM_UP + seconds]
    times = sorted(end - start for start, end, *_ in counted)
    return {
        "images_per_second": round(len(counted) / seconds, 1),
        "median_ms": round(1000 * times[len(times) // 2], 1),
        "p99_ms": round(1000 * times[int(0.99 * len(times))], 1),
        "memory_mib": memory,
        "responses": [(image, status, index) for *_, image, status, index in seen],
    }


def measure_baselines(classifier: Classifier, files: list[Path]) -> dict[str, float]:
    """Measure the model on decoded batches of 16 and decoding alone; return what both allow on the same cores."""
    start = time.perf_counter()
    pixels = [classifier.pixels(file) for file in files]
    decode = (time.perf_counter() - start) / len(files)
    batch = torch.stack(pixels[:16])
    with torch.inference_mode():
        classifier.logits(batch)
        rounds = []
        for _ in range(12):
            start = time.perf_counter()
            classifier.logits(batch)
            rounds.append((time.perf_counter() - start) / len(batch))
    compute = sorted(rounds)[len(rounds) // 2]
    cores = os.cpu_count() or 1
    allowed = 1 / (compute + decode / cores)
    return {"model": round(1 / compute, 1), "decode_ms": round(1000 * decode, 2), "allowed": round(allowed, 1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("folder")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=32)
    args = parser.parse_args()
    classifier = Classifier.load(args.model)
    files = list_images(args.folder)[:: max(1, len(list_images(args.folder)) // NUM_IMAGES)][:NUM_IMAGES]
    expected = [classifier(file, top=1).scores[0].index for file in files]
    limits = measure_baselines(classifier, files)
    print(f"model alone {limits['model']} images/s; with decoding on the same cores {limits['allowed']}")
    head = "POST /v1/predict?top=1 HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\nContent-Length: "
    requests = [f"{head}{len(data)}\r\n\r\n".encode() + data for data in (file.read_bytes() for file in files)]
    results: dict[str, Any] = {}
    for name, options in (("batching", ()), ("without batching", ("--batch-size", "1"))):
        results[name] = load(args.model, requests, args.seconds, args.clients, *options)
        responses = results[name].pop("responses")
        results[name]["requests"] = len(responses)
        results[name]["wrong"] = sum(status != 200 or index != expected[p] for p, status, index in responses)
        print(name, results[name])
    ratio = results["batching"]["images_per_second"]
    content = {
        "command": f"benchmarks/serve_load.py {short_path(args.model)} {short_path(args.folder)}",
        "clients": args.clients,
    }
    content |= {"seconds": args.seconds, "alone": limits, **results}
    content["fraction_of_allowed"] = round(ratio / limits["allowed"], 3)
    content["times_without_batching"] = round(ratio / results["without batching"]["images_per_second"], 2)
    print(content["fraction_of_allowed"], content["times_without_batching"])
    print(write_result("serve_load", content))


if __name__ == "__main__":
    main()
