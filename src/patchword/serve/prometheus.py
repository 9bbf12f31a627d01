"""Metrics for Prometheus, and the log: one JSON object per line, without file names or image content."""

import json
import sys
import time
from typing import Any, TextIO

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """The metrics and the log of one app; two apps in a process do not share them."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = out
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "patchword_requests", "Requests by path and status", ("path", "status"), registry=registry
        )
        self.request_duration = Histogram(
            "patchword_request_duration_seconds",
            "Time from the start of a request to its response",
            ("path",),
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self.batch_images = Histogram(
            "patchword_batch_images", "Images per batch", buckets=BATCH_BUCKETS, registry=registry
        )
        self.images_in_flight = Gauge(
            "patchword_images_in_flight", "Images that are decoded, waiting or computed", registry=registry
        )
        self.requests_rejected = Counter(
            "patchword_requests_rejected", "Requests rejected because the queue was full", registry=registry
        )
        self.images_abandoned = Counter(
            "patchword_images_abandoned", "Images dropped because the client disconnected", registry=registry
        )
        self.worker_restarts = Counter(
            "patchword_worker_restarts", "Restarts of the model's process", registry=registry
        )

    def record_request(self, path: str, method: str, status: int, seconds: float, request_id: str) -> None:
        """Count and log a request."""
        self.requests.labels(path, str(status)).inc()
        self.request_duration.labels(path).observe(seconds)
        duration = round(1000 * seconds, 1)
        self.log("request", request_id=request_id, method=method, path=path, status=status, milliseconds=duration)

    def record_restart(self) -> None:
        """Count and log a restart of the model's process."""
        self.worker_restarts.inc()
        self.log("worker restart", detail="The model's process died and is restarted.")

    def log(self, event: str, **fields: Any) -> None:
        """Write one line to the log."""
        row = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": event, **fields}
        out = self.out or sys.stderr
        out.write(json.dumps(row) + "\n")  # one call per line, because several threads write
        out.flush()

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)
