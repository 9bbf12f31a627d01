"""The server process: uvicorn with timeouts for slow clients, graceful shutdown and JSON logs."""

import asyncio
import ipaddress
import logging
import os
import signal
import socket
import time
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..checkpoints import Checkpoint
from .app import create_app
from .limits import Limits
from .prometheus import Metrics

HEADER_TIMEOUT = 5  # seconds in which the headers of a request must arrive, from the connection or its first byte on
SEND_TIMEOUT = 30  # seconds that a client may take to read a response
SHUTDOWN_GRACE = 0.3  # seconds, after SIGTERM, for requests that are arriving
KEEP_ALIVE_TIMEOUT = 5
MAX_HEADER_BYTES = 2**16


class Protocol(H11Protocol):
    """Closes connections of clients that send no request, send it too slowly, or do not read the response."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(HEADER_TIMEOUT, self.close_if_waiting, None)

    def data_received(self, data: bytes) -> None:
        cycle = self.cycle
        super().data_received(data)
        if self.cycle is cycle and (cycle is None or cycle.response_complete):  # the next request is incomplete
            self.loop.call_later(HEADER_TIMEOUT, self.close_if_waiting, cycle)

    def close_if_waiting(self, cycle: Any) -> None:
        """Close the connection if no request followed the one of `cycle`."""
        if self.cycle is cycle and not self.transport.is_closing():
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.loop.call_later(SEND_TIMEOUT, self.abort_if_unread)

    def abort_if_unread(self) -> None:
        """Abort the connection if the client has not read the response."""
        if self.transport.get_write_buffer_size() and (self.cycle is None or self.cycle.response_complete):
            self.transport.abort()


class JsonLogHandler(logging.Handler):
    """Writes warnings of libraries to the JSON log."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(logging.WARNING)
        self.metrics = metrics

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelname.lower()
        self.metrics.log("library", name=record.name, level=level, detail=record.getMessage())


class Server(uvicorn.Server):
    """Reports when it is ready. On SIGTERM it drains first; on shutdown it waits briefly for requests on their way.

    While it drains, /readyz returns 503, so that load balancers send new requests elsewhere; those that still arrive
    are served as before, and every response closes its connection.
    """

    def __init__(
        self, config: uvicorn.Config, app: FastAPI, name: str, url: str, engine: str, drain_seconds: float
    ) -> None:
        super().__init__(config)
        self.app, self.name, self.url, self.engine, self.drain_seconds = app, name, url, engine, drain_seconds
        self.metrics: Metrics = app.state.metrics

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.metrics.log("ready", url=self.url, engine=self.engine)
            print(f"patchword serves {self.name} at {self.url} (Ctrl-C stops it)", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGINT:  # whoever presses Ctrl-C does not want to wait for a load balancer
            self.drain_seconds = 0.0
        super().handle_exit(sig, frame)

    async def drain(self) -> None:
        """Accept requests for some more seconds, while /readyz says that there should be none."""
        self.app.state.service.ready = False
        if self.drain_seconds:
            self.metrics.log("draining", seconds=self.drain_seconds)
        start = time.monotonic()
        while time.monotonic() < start + self.drain_seconds:
            await self.on_tick(0)  # uvicorn's clock: the Date header of responses
            await asyncio.sleep(0.1)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self.drain()
        self.metrics.log("stopping")
        for listener in self.servers:
            listener.close()
        await asyncio.sleep(SHUTDOWN_GRACE)
        await super().shutdown(sockets)


def run_server(
    checkpoint: Checkpoint,
    name: str,
    listener: socket.socket,
    token: str | None,
    num_threads: int | None,
    limits: Limits,
    engine: str,
    drain_seconds: float = 0.0,
) -> None:
    """Serve until SIGTERM or Ctrl-C. All accepted requests get their response; the exit code is then 0.

    Args:
        checkpoint: The model.
        name: The model's title.
        listener: A bound socket.
        token: What clients must send; None for no authentication.
        num_threads: CPU threads of the model; None for all cores.
        limits: Size and time limits.
        engine: The inference engine, or "auto".
        drain_seconds: How long to keep accepting requests after SIGTERM while /readyz returns 503.
    """
    app = create_app(checkpoint, limits, token, num_threads, name=name, engine=engine)
    metrics: Metrics = app.state.metrics
    logging.getLogger().handlers = [JsonLogHandler(metrics)]
    config = uvicorn.Config(
        app, log_config=None, log_level="warning", access_log=False, server_header=False, http=Protocol,
        timeout_graceful_shutdown=int(limits.receive_timeout + limits.response_timeout) + 5,
        timeout_keep_alive=KEEP_ALIVE_TIMEOUT, h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )  # fmt: skip
    # Until uvicorn installs its handler there is nothing to finish; when it is done, uvicorn raises the signal again.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if token is None and not ipaddress.ip_address(host).is_loopback:
        detail = "Anyone who reaches this address can use the model: set PATCHWORD_TOKEN, or use a reverse proxy."
        metrics.log("warning", detail=detail)
    Server(config, app, name, url, app.state.engine, drain_seconds).run(sockets=[listener])
