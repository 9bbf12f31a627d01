"""Error responses: RFC 9457's problem+json, with a stable `code` that clients can rely on."""

from typing import Any

from starlette.responses import JSONResponse

# Of each status: its title, and its code where the raiser does not give a more exact one.
STATUSES = {
    400: ("The request cannot be understood", "bad_request"),
    401: ("A token is needed", "unauthorized"),
    404: ("There is nothing here", "not_found"),
    405: ("Not in this way", "method_not_allowed"),
    408: ("The request took too long to arrive", "request_timeout"),
    413: ("The request is too large", "request_too_large"),
    415: ("Not a kind of content that is read here", "unsupported_media_type"),
    422: ("The request cannot be fulfilled", "invalid_request"),
    500: ("A fault of the server", "internal_error"),
    503: ("Not just now", "unavailable"),
    504: ("The answer took too long", "response_timeout"),
}
OTHER = ("", "http_error")  # a status that only the framework uses


class Problem(Exception):
    """A request that is refused; `detail` says what was wrong and what to do, `code` says it to programs."""

    def __init__(
        self, status: int, detail: str, headers: dict[str, str] | None = None, *, code: str | None = None
    ) -> None:
        super().__init__(detail)
        self.title, default = STATUSES.get(status, OTHER)
        self.status, self.detail, self.headers, self.code = status, detail, headers or {}, code or default

    def response(self, request_id: str = "") -> JSONResponse:
        said: dict[str, Any] = {"status": self.status, "title": self.title, "detail": self.detail, "code": self.code}
        said |= {"request_id": request_id} if request_id else {}
        return JSONResponse(said, self.status, self.headers, media_type="application/problem+json")


def service_unavailable(why: str) -> Problem:
    return Problem(503, f"{why} Try again in a second.", {"Retry-After": "1"})
