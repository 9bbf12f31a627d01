"""The server under faults, over real sockets.

    python benchmarks/serve_faults.py MODEL IMAGE [--minutes 1]

Overload: ten times its capacity, for a minute. Kills: SIGKILL of the model process under load. Terminations:
SIGTERM under load. Malformed: 10,000 requests that no client should send. Writes results/serve_faults.json.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import time
from pathlib import Path
from typing import Any

from harness import write_result
from serve_load import RunningServer

CLIENTS = 16


def request_of(body: bytes, path: str = "/v1/predict?top=1", kind: str = "image/jpeg") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def send_request(address: tuple[str, int], request: bytes) -> tuple[int, float, dict[str, str]]:
    """Send a request on a new connection; return status (0: no response, -1: no connection), seconds and headers."""
    start = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection(*address)
    except OSError:
        return -1, 0.0, {}
    try:
        writer.write(request)
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).decode("latin-1")
        await reader.readexactly(int(re.search(r"content-length: (\d+)", head)[1]))  # type: ignore[index]
    except (OSError, asyncio.IncompleteReadError, TimeoutError, TypeError):
        return 0, time.perf_counter() - start, {}
    finally:
        writer.close()
    lines = [line.partition(": ") for line in head.split("\r\n")[1:] if line]
    return int(head.split()[1]), time.perf_counter() - start, {key.lower(): value for key, _, value in lines}


async def closed_loop(address: tuple[str, int], request: bytes, seconds: float) -> list[tuple[float, int]]:
    """Run `CLIENTS` clients that send the next request after each response; return time and status of all."""
    seen: list[tuple[float, int]] = []
    until = time.perf_counter() + seconds

    async def one() -> None:
        while time.perf_counter() < until:
            status, _, _ = await send_request(address, request)
            seen.append((time.perf_counter(), status))

    await asyncio.gather(*(one() for _ in range(CLIENTS)))
    return seen


async def overload(model: str, request: bytes, seconds: float) -> dict[str, Any]:
    server = RunningServer(model, "--queue-size", "64")
    calm = await closed_loop(server.address, request, 10)
    capacity = len(calm) / 10
    results: list[tuple[int, float, dict[str, str]]] = []
    memory = [server.memory()]

    async def one() -> None:
        results.append(await send_request(server.address, request))

    tasks, begin, spent = [], time.perf_counter(), time.process_time()
    while (passed := time.perf_counter() - begin) < seconds:
        while len(tasks) < 10 * capacity * passed:
            tasks.append(asyncio.create_task(one()))
        await asyncio.sleep(0.005)
    await asyncio.gather(*tasks)
    took, spent = time.perf_counter() - begin, time.process_time() - spent
    memory.append(server.memory())
    server.stop()
    refused = sorted(t for status, t, _ in results if status == 503)
    good = sum(status == 200 for status, _, _ in results)
    return {
        "capacity_per_second": round(capacity, 1),
        "sent": len(results),
        "completed": good,
        "goodput_fraction": round(good / took / capacity, 3),
        "refused": len(refused),
        "refused_with_retry_after": sum("retry-after" in h for status, _, h in results if status == 503),
        "refusal_median_ms": round(1000 * statistics.median(refused), 1),
        "other": sum(status not in (200, 503) for status, _, _ in results),
        "cores_used_by_clients": round(spent / took, 2),
        "memory_mib": memory,
    }


def worker_of(server: RunningServer) -> int:
    for child in Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split():
        for grandchild in Path(f"/proc/{child}/task/{child}/children").read_text().split():
            return int(grandchild)
    raise AssertionError("no worker")


def first_good(seen: list[tuple[float, int]], moment: float) -> float:
    """Return the time of the first success after the last refusal of a kill; earlier ones were computed before it."""
    refusals = [t for t, status in seen if moment <= t < moment + 4 and status == 503]
    return min(t for t, status in seen if t > max(refusals, default=moment) and status == 200)


async def kills(model: str, request: bytes, times: int) -> dict[str, Any]:
    server = RunningServer(model)
    load = asyncio.create_task(closed_loop(server.address, request, 4.0 * times + 2))
    moments = []
    for _ in range(times):
        await asyncio.sleep(4)
        os.kill(worker_of(server), signal.SIGKILL)
        moments.append(time.perf_counter())
    seen = await load
    server.stop()
    back = [first_good(seen, m) - m for m in moments]
    lost = [sum(status == 503 for t, status in seen if m <= t < m + 4) for m in moments]
    other = sum(status not in (200, 503) for _, status in seen)
    result = {"kills": times, "seconds_until_recovery": [round(b, 2) for b in back], "refused_per_kill": lost}
    return {**result, "completed": sum(status == 200 for _, status in seen), "other": other}


async def terminations(model: str, request: bytes, times: int) -> dict[str, Any]:
    """Count accepted requests without a response, and measure how long the server takes to end."""
    unfinished, ends = 0, []
    for _ in range(times):
        server = RunningServer(model)
        load = asyncio.create_task(closed_loop(server.address, request, 4))
        await asyncio.sleep(random.uniform(1, 3))
        server.process.terminate()
        start = time.perf_counter()
        while server.process.poll() is None:
            await asyncio.sleep(0.02)
        ends.append(round(time.perf_counter() - start, 2))
        assert server.process.returncode == 0
        seen = await load
        unfinished += sum(status == 0 for _, status in seen)
    return {"terminations": times, "unfinished": unfinished, "seconds_to_end": ends}


def malformed_request(rng: random.Random, image: bytes) -> bytes:
    path = rng.choice(["/v1/predict", "/v1/explain", "/v1/attention", "/v1/embed", "/v1/model", "/", "/x"])
    query = rng.choice(
        ["", "?top=-1", "?top=9e9", "?label=%00", "?layer=99", "?head=x", "?method=%ff", "?explain=maybe"]
    )
    kind = rng.choice(["image/jpeg", "application/json", "multipart/form-data; boundary=b", "text/plain", "", "\t"])
    cut = image[: rng.randrange(len(image))]
    noise = rng.randbytes(rng.randrange(2000))
    deep = b"[" * 500 + b"]" * 500
    form = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n' + cut + b"\r\n--b--\r\n"
    body = rng.choice(
        [b"", noise, cut, deep, form, b'{"image": 5}', b'{"images": ["AAAA"]}', b"--b\r\n" * 50, b"\0" * 999]
    )
    method = rng.choice(["POST", "POST", "POST", "GET", "PUT", "OPTIONS", "BREW"])
    length = len(body) if rng.random() < 0.95 else rng.choice([0, -1])  # slow senders are covered by a test
    extra = rng.choice(["", "X-Request-ID: \x01\r\n", f"X: {'y' * 5000}\r\n", "Expect: 100-continue\r\n"])
    head = f"{method} {path}{query} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n{extra}"
    return head.encode("latin-1") + b"Connection: close\r\n\r\n" + body


async def final_status(reader: asyncio.StreamReader) -> str:
    """Return the status of the final response, after any 100 Continue."""
    while line := await reader.readline():
        status = line.split()[1].decode()
        while (await reader.readline()).strip():
            pass
        if not status.startswith("1"):
            return status
    return "closed"


async def malformed(model: str, image: bytes, count: int) -> dict[str, Any]:
    server = RunningServer(model)
    rng = random.Random(0)
    statuses: dict[str, int] = {}

    async def one(request: bytes) -> None:
        try:
            reader, writer = await asyncio.open_connection(*server.address)
            writer.write(request)
            status = await asyncio.wait_for(final_status(reader), 40)
            writer.close()
        except (OSError, IndexError):
            status = "closed"
        except TimeoutError:
            status = "no response"
        statuses[status] = statuses.get(status, 0) + 1

    for _ in range(count // 20):
        await asyncio.gather(*(one(malformed_request(rng, image)) for _ in range(20)))
    after, _, _ = await send_request(server.address, request_of(image))
    server.stop()
    assert not any(status.startswith("5") and status != "503" for status in statuses), statuses
    return {"sent": count, "statuses": dict(sorted(statuses.items())), "works_afterwards": after == 200}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("image")
    parser.add_argument("--minutes", type=float, default=1)
    args = parser.parse_args()
    image = Path(args.image).read_bytes()
    request = request_of(image).replace(b"Host: x\r\n", b"Host: x\r\nConnection: close\r\n")
    content: dict[str, Any] = {"command": "benchmarks/serve_faults.py MODEL IMAGE"}
    content["overload"] = asyncio.run(overload(args.model, request, 60 * args.minutes))
    content["kills"] = asyncio.run(kills(args.model, request, 10))
    content["terminations"] = asyncio.run(terminations(args.model, request, 10))
    content["malformed"] = asyncio.run(malformed(args.model, image, 10_000))
    print(json.dumps(content, indent=2))
    print(write_result("serve_faults", content))


if __name__ == "__main__":
    main()
