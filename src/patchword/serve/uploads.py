"""Images of a request: files of a form, a raw body, or base64 in JSON. Never a path or a URL."""

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
    "Send an image as a form with files, as the body itself (Content-Type: image/jpeg), or as JSON: "
    '{"image": BASE64} or {"images": [BASE64, ...]}.'
)
MAX_JSON_TOKENS = 1000  # commas, colons and brackets of a JSON body; base64 has none of them


@dataclass(frozen=True)
class Upload:
    """An image file of a request."""

    name: str
    data: bytes


async def read_uploads(request: Request, limits: Limits) -> list[Upload]:
    """Return the images of a request: at least one, at most `limits.max_files`."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == "multipart/form-data":
        uploads = await read_form(request, limits)
    elif content_type == "application/json":
        uploads = parse_json(await request.body(), limits)
    elif content_type.startswith("image/") or content_type in ("application/octet-stream", ""):
        body = await request.body()
        uploads = [Upload("image", body)] if body else []
    else:
        raise Problem(415, f"The content type {content_type[:80]} is not supported. {HOW_TO_SEND}")
    if not uploads:
        raise Problem(422, f"The request contains no image. {HOW_TO_SEND}", code="no_image")
    return uploads


class FormParser(MultiPartParser):
    """Starlette's parser with a limit on files that raises an error of its own."""

    def __init__(self, request: Request, stream: AsyncGenerator[bytes, None], limits: Limits) -> None:
        # Starlette's own limit is never reached: `on_part_end` raises at the first file too many.
        super().__init__(
            request.headers,
            stream,
            max_files=limits.max_files + 1,
            max_fields=limits.max_files,
            max_part_size=limits.max_body_bytes,
        )
        self.limits, self.num_files = limits, 0

    def on_part_end(self) -> None:
        super().on_part_end()
        self.num_files += isinstance(self.items[-1][1], UploadFile)
        if self.num_files > self.limits.max_files:
            raise too_many_images(self.limits)


async def read_form(request: Request, limits: Limits) -> list[Upload]:
    """Return the files of a form."""
    try:
        async with aclosing(request.stream()) as stream:
            form = await FormParser(request, stream, limits).parse()
    except MultiPartException as error:
        raise Problem(400, error.message, code="invalid_form") from None
    except UnicodeError:
        raise Problem(400, "The form does not have the encoding that it declares.", code="invalid_form") from None
    try:
        files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        return [Upload(clean_filename(file.filename), await file.read()) for file in files]
    finally:
        await form.close()


def clean_filename(name: str | None) -> str:
    """Return a name that can be encoded in the response."""
    return (name or "image").encode("utf-8", "replace").decode()


def parse_json(body: bytes, limits: Limits) -> list[Upload]:
    """Return the images of a JSON body."""
    if sum(body.count(mark) for mark in (b",", b"[", b"{", b":")) > MAX_JSON_TOKENS:  # would take seconds to parse
        raise Problem(422, f"The JSON has an unexpected structure. {HOW_TO_SEND}", code="invalid_json")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise Problem(400, "The body is not valid JSON.", code="invalid_json") from None
    if not isinstance(document, dict):
        raise Problem(422, f"The JSON must be an object. {HOW_TO_SEND}", code="invalid_json")
    images: Any = document.get("images", [document["image"]] if "image" in document else [])
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise Problem(422, '"image" must be a base64 string, "images" a list of them.', code="invalid_json")
    if len(images) > limits.max_files:
        raise too_many_images(limits)
    return [Upload(f"image {number}", decode_base64(text, number)) for number, text in enumerate(images, 1)]


def too_many_images(limits: Limits) -> Problem:
    """Return the problem of a request with too many images."""
    detail = f"A request may contain at most {limits.max_files} images. Send the others in further requests."
    return Problem(422, detail, code="too_many_images")


def decode_base64(text: str, number: int) -> bytes:
    """Decode base64, with or without the prefix of a data URL."""
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Problem(422, f"Image {number} is not valid base64.", code="invalid_base64") from None
