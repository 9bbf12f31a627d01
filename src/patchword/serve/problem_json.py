"""Error responses: problem+json (RFC 9457) with a stable `code` for programs."""

from typing import Any

from starlette.responses import JSONResponse

# For each status: its title, and its code unless the error has a more specific one.
STATUSES = {
    400: ("Bad request", "bad_request"),
    401: ("Unauthorized", "unauthorized"),
    404: ("Not found", "not_found"),
    405: ("Method not allowed", "method_not_allowed"),
    408: ("Request timeout", "request_timeout"),
    413: ("Content too large", "request_too_large"),
    415: ("Unsupported media type", "unsupported_media_type"),
    422: ("Unprocessable content", "invalid_request"),
    500: ("Internal server error", "internal_error"),
    503: ("Service unavailable", "unavailable"),
    504: ("Response timeout", "response_timeout"),
}
OTHER = ("", "http_error")  # a status that only the framework uses


class Problem(Exception):  # noqa: N818  # the name that RFC 9457 gives it
    """A request that is rejected; `detail` tells people what is wrong and what to do, `code` tells programs."""

    def __init__(
        self, status: int, detail: str, headers: dict[str, str] | None = None, *, code: str | None = None
    ) -> None:
        super().__init__(detail)
        self.title, default = STATUSES.get(status, OTHER)
        self.status, self.detail, self.headers, self.code = status, detail, headers or {}, code or default

    def response(self, request_id: str = "") -> JSONResponse:
        """Return the HTTP response."""
        document: dict[str, Any] = {"status": self.status, "title": self.title}
        document |= {"detail": self.detail, "code": self.code}
        document |= {"request_id": request_id} if request_id else {}
        return JSONResponse(document, self.status, self.headers, media_type="application/problem+json")


def service_unavailable(reason: str) -> Problem:
    """Return the problem of a server that is overloaded, starting or stopping."""
    return Problem(503, f"{reason} Try again in a second.", {"Retry-After": "1"})
