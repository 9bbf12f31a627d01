"""Limits of the server. Every one of them bounds memory or time."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of the server.

    Attributes:
        max_body_bytes: Size of one request.
        max_total_body_bytes: Size of all requests that are being received or processed.
        max_pixels: Pixels of one image; larger ones are rejected before they are decoded.
        max_files: Images per request.
        queue_size: Images in the server: being decoded, waiting, or being computed.
        batch_size: Images per batch.
        receive_timeout: Seconds in which a request must arrive.
        response_timeout: Seconds from then on until the response.
    """

    max_body_bytes: int = 32 * 2**20
    max_total_body_bytes: int = 512 * 2**20
    max_pixels: int = 50_000_000
    max_files: int = 16
    queue_size: int = 256
    batch_size: int = 16
    receive_timeout: float = 30.0
    response_timeout: float = 30.0
