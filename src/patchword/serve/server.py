"""The server as a process: uvicorn, told to answer what it accepted, to be quick about the rest, and to be quiet."""

import asyncio
import ipaddress
import logging
import os
import signal
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..checkpoints import Checkpoint
from .app import create_app
from .limits import Limits
from .prometheus import Metrics

HEADER_TIMEOUT = 5  # seconds that the head of a request may take, the first one counted from the connection on
SEND_TIMEOUT = 30  # seconds that a client may take to read an answer
SHUTDOWN_GRACE = 0.3  # seconds, after a SIGTERM, for requests that are on their way in


class Protocol(H11Protocol):
    """Closes connections of clients that do not ask, ask too slowly, or do not read; they would stay for ever."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(HEADER_TIMEOUT, self.close_if_waiting, None)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is before and (before is None or before.response_complete):  # not yet, or no longer, a request
            self.loop.call_later(HEADER_TIMEOUT, self.close_if_waiting, before)

    def close_if_waiting(self, cycle: Any) -> None:
        if self.cycle is cycle and not self.transport.is_closing():
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.loop.call_later(SEND_TIMEOUT, self.abort_if_unread)

    def abort_if_unread(self) -> None:
        if self.transport.get_write_buffer_size() and (self.cycle is None or self.cycle.response_complete):
            self.transport.abort()


class JsonLogHandler(logging.Handler):
    """What libraries have to say, as a line of our log."""

    def __init__(self, meters: Metrics) -> None:
        super().__init__(logging.WARNING)
        self.meters = meters

    def emit(self, record: logging.LogRecord) -> None:
        self.meters.log("library", name=record.name, level=record.levelname.lower(), detail=record.getMessage())


class Server(uvicorn.Server):
    """Says when it can answer; before it stops, gives connections that were accepted the time to say what they want."""

    name = address = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            state = self.config.app.state  # type: ignore[union-attr]
            state.meters.log("ready", url=self.address, engine=state.engine)
            print(f"patchword serves {self.name} at {self.address} (Ctrl-C stops it)", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.state.meters.log("stopping")  # type: ignore[union-attr]
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
) -> None:
    """Serves until SIGTERM or Ctrl-C; what was accepted by then is answered. `name` is what the model is called."""
    app = create_app(checkpoint, limits, token, num_threads, name=name, engine=engine)
    logging.getLogger().handlers = [JsonLogHandler(app.state.meters)]
    config = uvicorn.Config(
        app, log_config=None, log_level="warning", access_log=False, server_header=False,
        timeout_graceful_shutdown=int(limits.sending + limits.answering) + 5, timeout_keep_alive=5, http=Protocol,
        h11_max_incomplete_event_size=2**16,
    )  # fmt: skip
    # Before uvicorn takes it over there is nothing to end; when all is done, uvicorn raises it once more.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    server = Server(config)
    host, port = listener.getsockname()[:2]
    server.name, server.address = name, f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if token is None and not ipaddress.ip_address(host).is_loopback:
        said = "Whoever reaches this address can use the model: set PATCHWORD_TOKEN, or stand a gateway before it."
        app.state.meters.log("warning", detail=said)
    server.run(sockets=[listener])
