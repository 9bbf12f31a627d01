"""What the server takes on, and what it refuses. Every number here bounds memory or time."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    body: int = 32 * 2**20  # bytes of one request
    bodies: int = 512 * 2**20  # bytes of all requests that are being read or worked on
    pixels: int = 50_000_000  # of one picture, refused before it is decoded
    files: int = 16  # pictures of one request
    queue: int = 256  # pictures in the house: being decoded, waiting, being computed
    batch: int = 16  # pictures that go through the model together
    sending: float = 30.0  # seconds that a client may take to send a request
    answering: float = 30.0  # seconds from then on until it is answered
