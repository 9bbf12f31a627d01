"""What every request passes first: its size, its pace, its token; and what every answer carries: headers, a log line.

Bodies that will be wanted are read here, whole, before anything else happens, so a slow sender holds nothing but its
own bytes. Others are never read.
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
CHUNK_BYTES = 2**16  # bytes
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestMiddleware:
    """ASGI around the app."""

    def __init__(self, app: ASGIApp, limits: Limits, meters: Metrics, token: str | None, paths: frozenset[str]) -> None:
        self.app, self.limits, self.meters, self.token, self.paths = app, limits, meters, token, paths
        self.bytes_inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, start = Headers(scope=scope), time.perf_counter()
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = {**HEADERS, "x-request-id": request_id}
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in extra.items())]
            await send(message)

        scope.setdefault("state", {})["request_id"] = request_id
        path = get_route_path(scope)  # without the prefix of an app that this one is mounted in
        held = 0
        try:
            self.check_token(headers, path)
            if scope["method"] == "POST" and path.startswith("/v1/") and path in self.paths:  # nobody else reads one
                body = await self.read(headers, receive)
                held = len(body)
                self.check_room(scope)
                receive = replay_body(body, receive)
            await self.app(scope, receive, answer)
        except Problem as problem:
            if not status:
                await problem.response(request_id)(scope, receive, answer)
        except ClientDisconnected:
            status = 499  # as nginx has it: nobody is there to be answered
        except Exception:
            self.meters.log("a fault of ours", request_id=request_id, traceback=traceback.format_exc())
            if not status:
                fault = Problem(500, "Something went wrong in the server. Its log says what, under this request_id.")
                await fault.response(request_id)(scope, receive, answer)
        finally:
            self.bytes_inside -= held
            known = path if path in self.paths else "other"
            self.meters.answered(known, scope["method"], status or 500, time.perf_counter() - start, request_id)

    def check_token(self, headers: Headers, path: str) -> None:
        if self.token is None or not path.startswith(("/v1/", "/metrics")):
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self.token.encode()):
            raise Problem(401, "Send the header Authorization: Bearer TOKEN.", {"WWW-Authenticate": "Bearer"})

    def check_room(self, scope: Scope) -> None:
        """Refuses here, where it is cheap, what would be refused anyway: the time is the model's."""
        service = getattr(scope["app"].state, "service", None)
        if service is not None:
            service.batcher.check_room(1)

    async def read(self, headers: Headers, receive: Receive) -> bytes:
        announced = headers.get("content-length", "0")
        if announced.isdecimal() and int(announced) > self.limits.body:
            raise self.too_large()
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.limits.sending):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    self.bytes_inside += len(chunk)
                    if size > self.limits.body:
                        raise self.too_large()
                    if self.bytes_inside > self.limits.bodies:
                        raise service_unavailable("Too much is being uploaded at once.")
                    chunks.append(chunk)
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except BaseException as error:
            self.bytes_inside -= size
            if not isinstance(error, TimeoutError):
                raise
            late = f"The request must arrive within {self.limits.sending:g} seconds."
            raise Problem(408, late, {"Connection": "close"}) from None

    def too_large(self) -> Problem:
        return Problem(413, f"A request may have {self.limits.body / 2**20:g} MiB. Send fewer or smaller pictures.")


class ClientDisconnected(Exception):
    """The client closed the connection before it was answered."""


def replay_body(body: bytes, receive: Receive) -> Receive:
    """The body in pieces, so that parsing it does not hold up everyone else; after it whatever the client does next."""
    rest: list[bytes] = [body[i : i + CHUNK_BYTES] for i in range(0, len(body), CHUNK_BYTES)][::-1] or [b""]

    async def again() -> dict[str, Any]:
        if not rest:
            return dict(await receive())  # which can only be to leave
        await asyncio.sleep(0)
        return {"type": "http.request", "body": rest.pop(), "more_body": bool(rest)}

    return again
