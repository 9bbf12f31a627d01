"""The server as a process: uvicorn, told to answer what it accepted, to be quick about the rest, and to be quiet."""

import asyncio
import ipaddress
import os
import signal
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..checkpoints import Checkpoint
from .app import create_app
from .limits import Limits
from .meters import Meters

FIRST_REQUEST = 10  # seconds that a connection may take to begin its first request
LAST_REQUEST = 0.3  # seconds, after a SIGTERM, for requests that are on their way in


class Protocol(H11Protocol):
    """Closes connections that never ask anything, which would otherwise stay for ever."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(FIRST_REQUEST, self.close_if_idle)

    def close_if_idle(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()


class Server(uvicorn.Server):
    """Says when it can answer; before it stops, gives connections that were accepted the time to say what they want."""

    name = address = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            meters: Meters = self.config.app.state.meters  # type: ignore[union-attr]
            meters.log("ready", url=self.address)
            print(f"patchword serves {self.name} at {self.address} (Ctrl-C stops it)", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.state.meters.log("stopping")  # type: ignore[union-attr]
        for listener in self.servers:
            listener.close()
        await asyncio.sleep(LAST_REQUEST)
        await super().shutdown(sockets)


def run(
    checkpoint: Checkpoint, name: str, listener: socket.socket, token: str | None, threads: int | None, limits: Limits
) -> None:
    """Serves until SIGTERM or Ctrl-C; what was accepted by then is answered. `name` is what the model is called."""
    app = create_app(checkpoint, limits, token, threads, name=name)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False,
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
