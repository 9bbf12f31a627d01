"""Two replicas behind HAProxy, one of which is stopped or killed in every round, under load.

    .venv/bin/python benchmarks/serve_replicas.py --rounds 40 --clients 8         # about a quarter of an hour

HAProxy runs with deploy/haproxy.cfg, the replicas with the bundled model. Rounds with SIGTERM and SIGKILL take turns;
the replica that has ended is started again at the same address, as in a rolling update, before the next round. Every
response is compared with the prediction for its image. `lost` are requests without a prediction: their connection
failed, or they got another status than 200; `wrong` are predictions of another image. Writes
results/serve_replicas.json.
"""

import argparse
import random
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from harness import write_result

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.replicas import MODEL, OPTIONS, Images, Load, Proxy, Replicas, proxied
from helpers.serving import TIMEOUT, Server

REQUESTS = 40  # of each phase: before, during and after


def run_round(number: signal.Signals, servers: list[Server], index: int, proxy: Proxy, load: Load) -> Counter[str]:
    """End one replica and start it again; count what the clients saw meanwhile."""
    first, moved = len(load.answers), proxy.num_redispatched()
    load.wait_for(REQUESTS)
    old = servers[index]
    in_flight = old.metric("patchword_images_in_flight")
    old.process.send_signal(number)
    code = old.process.wait(TIMEOUT)
    load.wait_for(REQUESTS)
    old.kill()
    servers[index] = Server(MODEL, *OPTIONS, port=int(old.url.rpartition(":")[2]))
    proxy.wait_until_up(len(servers))
    load.wait_for(REQUESTS)
    answers = load.answers[first:]
    return Counter(
        rounds=1,
        requests=len(answers),
        lost=sum(answer.status != 200 for answer in answers),
        wrong=sum(answer.status == 200 and not answer.right for answer in answers),
        in_flight_at_signal=int(in_flight),
        sent_to_another_replica=proxy.num_redispatched() - moved,
        unclean_ends=int(code != (0 if number == signal.SIGTERM else -number)),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--clients", type=int, default=8)
    args = parser.parse_args()
    rng, images = random.Random(0), Images()
    content: dict[str, Any] = {
        "command": f"benchmarks/serve_replicas.py --rounds {args.rounds}",
        "clients": args.clients,
    }
    counts = {signal.SIGTERM: Counter[str](), signal.SIGKILL: Counter[str]()}
    started = Replicas()
    servers = started.take(2, *OPTIONS)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            proxied(Path(folder), servers) as proxy,
            Load(proxy.url, images, args.clients) as load,
        ):
            for at in range(args.rounds):
                number = list(counts)[at % 2]
                seen = run_round(number, servers, rng.randrange(2), proxy, load)
                counts[number].update(seen)
                print(number.name, dict(seen), flush=True)
    finally:
        for server in servers:
            server.kill()
    content |= {number.name.lower(): dict(count) for number, count in counts.items()}
    content["statuses"] = dict(Counter(str(answer.status) for answer in load.answers))
    print(write_result("serve_replicas", content))


if __name__ == "__main__":
    main()
