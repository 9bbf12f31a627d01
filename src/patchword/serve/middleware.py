"""Middleware: checks the token, size and arrival time of every request; adds headers and a log line to every response.

Request bodies are read completely before anything else happens, so a slow client holds nothing but its own bytes.
Bodies that no endpoint needs are never read.
"""

import asyncio
import hmac
import re
import time
import traceback
import uuid
from typing import Any

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .limits import Limits
from .problem_json import Problem, service_unavailable
from .prometheus import Metrics

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(self), microphone=(), geolocation=()",
    "cache-control": "no-store",
}
CLIENT_CLOSED_REQUEST = 499  # nginx's status, for the log: there is nobody to respond to
CHUNK_BYTES = 2**16
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class ClientDisconnectedError(Exception):
    """The client closed the connection before the response."""


class ResponseSender:
    """Adds headers to a response, and remembers its status (0: not sent yet)."""

    def __init__(self, send: Send, scope: Scope, request_id: str) -> None:
        self.send, self.scope, self.request_id, self.status = send, scope, request_id, 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            extra = {**HEADERS, "x-request-id": self.request_id}
            service = find_service(self.scope)
            if service is not None and not service.ready:  # a request after this one would find the connection closed
                extra["connection"] = "close"
            message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in extra.items())]
        await self.send(message)


class RequestMiddleware:
    """ASGI middleware around the app.

    Args:
        app: The app.
        limits: Size and time limits of a request.
        metrics: Counts and logs every request.
        token: What clients must send; None for no authentication.
        paths: Paths of the app, which appear in metrics and logs; others are "other".
    """

    def __init__(
        self, app: ASGIApp, limits: Limits, metrics: Metrics, token: str | None, paths: frozenset[str]
    ) -> None:
        self.app, self.limits, self.metrics, self.token, self.paths = app, limits, metrics, token, paths
        self.bytes_in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, given_id = time.perf_counter(), Headers(scope=scope).get("x-request-id", "")
        request_id = given_id if REQUEST_ID.fullmatch(given_id) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        path = get_route_path(scope)  # without the prefix under which the app may be mounted
        sender = ResponseSender(send, scope, request_id)
        try:
            await self.process(scope, receive, sender, path)
        except Problem as problem:
            if not sender.status:
                await problem.response(request_id)(scope, receive, sender)
        except ClientDisconnectedError:
            sender.status = CLIENT_CLOSED_REQUEST
        except Exception:
            self.metrics.log("internal error", request_id=request_id, traceback=traceback.format_exc())
            if not sender.status:
                internal = Problem(500, "Internal error. See the server's log under this request_id.")
                await internal.response(request_id)(scope, receive, sender)
        finally:
            known_path = path if path in self.paths else "other"
            seconds = time.perf_counter() - start
            self.metrics.record_request(known_path, scope["method"], sender.status or 500, seconds, request_id)

    async def process(self, scope: Scope, receive: Receive, sender: ResponseSender, path: str) -> None:
        """Check the request, read its body if an endpoint needs it, and run the app."""
        headers = Headers(scope=scope)
        self.check_token(headers, path)
        if scope["method"] != "POST" or not path.startswith("/v1/") or path not in self.paths:
            await self.app(scope, receive, sender)
            return
        body = await self.read_body(headers, receive)
        try:
            self.check_capacity(scope)
            await self.app(scope, replay_body(body, receive), sender)
        finally:
            self.bytes_in_flight -= len(body)

    def check_token(self, headers: Headers, path: str) -> None:
        """Raise a `Problem` unless the request has the token, or needs none."""
        if self.token is None or not path.startswith(("/v1/", "/metrics")):
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self.token.encode()):
            raise Problem(401, "Send the header Authorization: Bearer TOKEN.", {"WWW-Authenticate": "Bearer"})

    def check_capacity(self, scope: Scope) -> None:
        """Reject early, before the body is parsed, what would be rejected anyway."""
        service = find_service(scope)
        if service is not None:
            service.batcher.check_capacity(1)

    async def read_body(self, headers: Headers, receive: Receive) -> bytes:
        """Read the body within the limits; its size is added to `bytes_in_flight`."""
        content_length = headers.get("content-length", "0")
        if content_length.isdecimal() and int(content_length) > self.limits.max_body_bytes:
            raise self.too_large()
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.limits.receive_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnectedError
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    self.bytes_in_flight += len(chunk)
                    if size > self.limits.max_body_bytes:
                        raise self.too_large()
                    if self.bytes_in_flight > self.limits.max_total_body_bytes:
                        raise service_unavailable("Too many bytes are being uploaded.")
                    chunks.append(chunk)
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except BaseException as error:
            self.bytes_in_flight -= size
            if not isinstance(error, TimeoutError):
                raise
            detail = f"The request did not arrive within {self.limits.receive_timeout:g} seconds."
            raise Problem(408, detail, {"Connection": "close"}) from None

    def too_large(self) -> Problem:
        """Return the problem of a request that is too large."""
        limit = self.limits.max_body_bytes / 2**20
        return Problem(413, f"A request may have at most {limit:g} MiB. Send fewer or smaller images.")


def find_service(scope: Scope) -> Any:
    """Return the service of the app; None before its lifespan has started."""
    return getattr(scope["app"].state, "service", None)


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields the body in chunks (parsing must not block), and then the client's events."""
    chunks: list[bytes] = [body[i : i + CHUNK_BYTES] for i in range(0, len(body), CHUNK_BYTES)][::-1] or [b""]

    async def receive_again() -> dict[str, Any]:
        if not chunks:
            return dict(await receive())  # can only be a disconnect
        await asyncio.sleep(0)
        return {"type": "http.request", "body": chunks.pop(), "more_body": bool(chunks)}

    return receive_again
