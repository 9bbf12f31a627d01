"""What the server counts, for Prometheus, and what it logs: a JSON object a line, never a picture or a name."""

import json
import sys
import time
from typing import Any, TextIO

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """One set for each app, so that two in a process do not mix."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = out
        self.registry = registry = CollectorRegistry()
        labels = ("path", "status")
        self.requests = Counter("patchword_requests", "Requests answered", labels, registry=registry)
        self.seconds = Histogram(
            "patchword_seconds", "Seconds to answer", ("path",), buckets=DURATION_BUCKETS, registry=registry
        )
        sizes = (1, 2, 4, 8, 16, 32, 64)
        self.batches = Histogram("patchword_batch_pictures", "Pictures of a batch", buckets=sizes, registry=registry)
        self.inside = Gauge("patchword_pictures_inside", "Pictures admitted and not yet answered", registry=registry)
        self.refused = Counter("patchword_refused", "Requests refused for lack of room", registry=registry)
        self.abandoned = Counter("patchword_abandoned", "Pictures dropped: nobody waited any more", registry=registry)
        self.restarts = Counter(
            "patchword_worker_restarts", "Times the model's process had to be started again", registry=registry
        )

    def answered(self, path: str, method: str, status: int, seconds: float, request_id: str) -> None:
        self.requests.labels(path, str(status)).inc()
        self.seconds.labels(path).observe(seconds)
        said = {"method": method, "path": path, "status": status, "milliseconds": round(1000 * seconds, 1)}
        self.log("answered", request_id=request_id, **said)

    def restarted(self) -> None:
        self.restarts.inc()
        self.log("the model's process died and is started again")

    def log(self, event: str, **fields: Any) -> None:
        row = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": event, **fields}
        out = self.out or sys.stderr
        out.write(json.dumps(row) + "\n")  # in one piece, since several threads write
        out.flush()

    def text(self) -> bytes:
        return generate_latest(self.registry)
