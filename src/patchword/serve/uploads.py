"""Pictures out of a request: files of a form, a raw body, or base64 in JSON. Never a path or an address."""

import base64
import binascii
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from .limits import Limits
from .problem_json import Problem

HOW_TO_SEND = (
    "Send a picture as a form with files, as the body itself (Content-Type: image/jpeg), or as JSON: "
    '{"image": BASE64} or {"images": [BASE64, ...]}.'
)

MAX_JSON_TOKENS = 1000  # commas, colons and brackets of a JSON request; base64 has none of them


@dataclass(frozen=True)
class Upload:
    name: str
    data: bytes


async def read_uploads(request: Request, limits: Limits) -> list[Upload]:
    """What a request brings; at least one picture, at most as many as the limit."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        found = await from_form(request, limits)
    elif kind == "application/json":
        found = from_json(await request.body(), limits)
    elif kind.startswith("image/") or kind in ("application/octet-stream", ""):
        body = await request.body()
        found = [Upload("picture", body)] if body else []
    else:
        raise Problem(415, f"{kind[:80]} is not read here. {HOW_TO_SEND}")
    if not found:
        raise Problem(422, f"There is no picture in the request. {HOW_TO_SEND}", code="no_image")
    return found


class FormParser(MultiPartParser):
    """Starlette's parser, with a limit on files whose violation can be told from other errors of the form."""

    def __init__(self, request: Request, stream: AsyncGenerator[bytes, None], limits: Limits) -> None:
        # Starlette's own limit on files is out of reach: `on_part_end` raises at the first file too many.
        sizes = {"max_files": limits.files + 1, "max_fields": limits.files, "max_part_size": limits.body}
        super().__init__(request.headers, stream, **sizes)
        self.limits, self.files = limits, 0

    def on_part_end(self) -> None:
        super().on_part_end()
        self.files += isinstance(self.items[-1][1], UploadFile)
        if self.files > self.limits.files:
            raise too_many_images(self.limits)


async def from_form(request: Request, limits: Limits) -> list[Upload]:
    try:
        async with aclosing(request.stream()) as stream:
            form = await FormParser(request, stream, limits).parse()
    except MultiPartException as error:
        raise Problem(400, error.message, code="invalid_form") from None
    except UnicodeError:
        raise Problem(400, "The form is not in the encoding that it names.", code="invalid_form") from None
    try:
        files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        return [Upload(clean_filename(file.filename), await file.read()) for file in files]
    finally:
        await form.close()


def clean_filename(name: str | None) -> str:
    """A name that can be told back."""
    return (name or "picture").encode("utf-8", "replace").decode()


def from_json(body: bytes, limits: Limits) -> list[Upload]:
    if sum(body.count(mark) for mark in (b",", b"[", b"{", b":")) > MAX_JSON_TOKENS:  # it would take seconds to read
        raise Problem(422, f"The JSON is not what is read here. {HOW_TO_SEND}", code="invalid_json")
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        raise Problem(400, "The body is not JSON.", code="invalid_json") from None
    if not isinstance(said, dict):
        raise Problem(422, f"The JSON must be an object. {HOW_TO_SEND}", code="invalid_json")
    given: Any = said.get("images", [said["image"]] if "image" in said else [])
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise Problem(422, '"images" must be a list of base64 texts, "image" one of them.', code="invalid_json")
    if len(given) > limits.files:
        raise too_many_images(limits)
    return [Upload(f"picture {number}", decode_base64(text, number)) for number, text in enumerate(given, 1)]


def too_many_images(limits: Limits) -> Problem:
    detail = f"A request may have {limits.files} pictures. Send the others in another one."
    return Problem(422, detail, code="too_many_images")


def decode_base64(text: str, number: int) -> bytes:
    """Base64, with or without the head of a data address."""
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Problem(422, f"Picture {number} is not valid base64.", code="invalid_base64") from None
