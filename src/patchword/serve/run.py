"""The server as a process: uvicorn, told to answer what it accepted, to be quick about the rest, and to be quiet."""

import asyncio
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..checkpoints import Checkpoint
from .app import create_app
from .limits import Limits

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
    """Says when it listens; before it stops, gives connections that were accepted the time to say what they want."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.config.app.state.meters.log("ready")  # type: ignore[union-attr]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self.servers:
            listener.close()
        await asyncio.sleep(LAST_REQUEST)
        await super().shutdown(sockets)


def run(
    checkpoint: Checkpoint, sockets: Sequence[socket.socket], token: str | None, threads: int | None, limits: Limits
) -> None:
    """Serves until SIGTERM or Ctrl-C; what was accepted by then is answered."""
    config = uvicorn.Config(
        create_app(checkpoint, limits, token, threads), log_level="warning", access_log=False, server_header=False,
        timeout_graceful_shutdown=int(limits.sending + limits.answering) + 5, timeout_keep_alive=5, http=Protocol,
        h11_max_incomplete_event_size=2**16,
    )  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it once more when all is done
    Server(config).run(sockets=list(sockets))
