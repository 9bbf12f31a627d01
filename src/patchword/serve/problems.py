"""What a client is told when it does not get an answer, as RFC 9457's problem+json."""

from typing import Any

from starlette.responses import JSONResponse

TITLES = {
    400: "The request cannot be understood",
    401: "A token is needed",
    404: "There is nothing here",
    405: "Not in this way",
    408: "The request took too long to arrive",
    413: "The request is too large",
    415: "Not a kind of content that is read here",
    422: "The request cannot be fulfilled",
    500: "A fault of the server",
    503: "Not just now",
    504: "The answer took too long",
}


class Problem(Exception):
    """A request that is refused; `detail` says what was wrong and what to do."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers or {}

    def response(self, request_id: str = "") -> JSONResponse:
        said: dict[str, Any] = {"status": self.status, "title": TITLES.get(self.status, ""), "detail": self.detail}
        said |= {"request_id": request_id} if request_id else {}
        return JSONResponse(said, self.status, self.headers, media_type="application/problem+json")


def busy(why: str) -> Problem:
    return Problem(503, f"{why} Try again in a second.", {"Retry-After": "1"})
