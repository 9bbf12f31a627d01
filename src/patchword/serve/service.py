"""From uploaded bytes to results: decoded in threads, computed by the batcher, while the client is connected."""

import asyncio
import base64
import io
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from starlette.requests import Request

from ..checkpoints import Checkpoint
from ..config import ViTConfig
from ..data.preprocess import Preprocess
from ..engines.engine import PreparedEngine
from ..errors import ImageError
from ..inference.open_image import decode
from ..inference.predictions import class_labels, top_predictions
from ..inspection.explain import CLASS_METHODS, Method, methods_for
from ..plots.overlay import overlay_heatmap, scale_to_unit
from .batcher import Batcher
from .limits import Limits
from .middleware import ClientDisconnectedError
from .problem_json import Problem
from .prometheus import Metrics
from .uploads import Upload
from .worker import Worker

T = TypeVar("T")
NUM_DECODERS = 2
WORKER_TIMEOUT_FACTOR = 2  # times the response timeout: then the model's process hangs
MAX_OVERLAY_PIXELS = 2_000_000  # of an image with its heatmap; larger images are shrunk
MAX_OVERLAY_SIDE = 4096  # pixels; bounds the size of extremely narrow images


@dataclass(frozen=True)
class DecodedUpload:
    """A decoded image.

    Attributes:
        pixels: What the model sees, uint8 (H, W, C).
        box: Where that is in the image: left, top, right, bottom, as fractions of its sides.
        full_image: The whole image, if a heatmap is drawn on it.
    """

    pixels: np.ndarray
    box: list[float]
    full_image: Image.Image | None


Compute = Callable[[DecodedUpload], Awaitable[dict[str, Any]]]


class Service:
    """The model's process, its queue and the decoders. Lives as long as the app."""

    def __init__(
        self, checkpoint: Checkpoint, engine: PreparedEngine, limits: Limits, metrics: Metrics, num_threads: int | None
    ) -> None:
        assert checkpoint.preprocess is not None
        self.checkpoint, self.limits, self.engine = checkpoint, limits, engine.name
        self.preprocess: Preprocess = checkpoint.preprocess
        self.labels = class_labels(checkpoint)
        timeout = WORKER_TIMEOUT_FACTOR * limits.response_timeout
        self.worker = Worker(checkpoint, engine, num_threads, timeout, metrics.record_restart)
        self.decoders = ThreadPoolExecutor(NUM_DECODERS, thread_name_prefix="decode")
        self.decoder_slots = asyncio.Semaphore(NUM_DECODERS)
        self.batcher = Batcher(self.worker, limits, metrics)
        self.ready = False

    @property
    def methods(self) -> tuple[Method, ...]:
        """Explanation methods of this model, the default first."""
        return methods_for(self.checkpoint.config)

    async def warm_up(self) -> None:
        """Compute twice: the first call is slow, the second one measures the time per image."""
        black = np.zeros((*self.preprocess.size, self.preprocess.channels), np.uint8)
        for _ in range(2):
            start = time.monotonic()
            await self.batcher.submit(black, "predict")
            self.batcher.seconds_per_image = time.monotonic() - start
        self.ready = True

    async def close(self) -> None:
        """Finish the admitted images and stop."""
        self.ready = False
        await self.batcher.close()
        self.worker.stop()
        self.decoders.shutdown(wait=False)

    async def run_in_decoder(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function in the pool of decoders.

        Its slot is held until the function returns, even if this call is cancelled, so that work cannot pile up.
        """
        await self.decoder_slots.acquire()
        future = asyncio.get_running_loop().run_in_executor(self.decoders, function, *arguments)
        future.add_done_callback(lambda _: self.decoder_slots.release())  # this call may be cancelled, even twice
        return await asyncio.shield(future)

    def decode(self, upload: Upload, full: bool) -> DecodedUpload | ImageError:
        """Decode an upload; `full` also keeps the whole image."""
        max_pixels = self.limits.max_pixels
        try:
            decoded = decode(upload.data, self.preprocess, full=full, max_pixels=max_pixels)
        except ImageError as error:
            if error.code == "image_too_large":  # the reason names a Python argument, which a client does not have
                return ImageError(f"it has more than {max_pixels:,} pixels. Shrink it first.", code=error.code)
            return error
        width, height = decoded.image.size
        left, top, right, bottom = self.preprocess.crop_box(height, width)
        box = [round(v, 5) for v in (left / width, top / height, right / width, bottom / height)]
        return DecodedUpload(decoded.pixels, box, shrink_for_overlay(decoded.image) if full else None)

    async def process_all(self, uploads: list[Upload], compute: Compute, full: bool = False) -> list[dict[str, Any]]:
        """Run `compute` for all uploads concurrently; an upload that cannot be read has an error instead."""
        self.batcher.admit(len(uploads))
        tasks = [asyncio.ensure_future(self.process_one(upload, compute, full)) for upload in uploads]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # if one failed or the client disconnected, the others are not needed either
                task.cancel()
            self.batcher.release(len(uploads))

    async def process_one(self, upload: Upload, compute: Compute, full: bool) -> dict[str, Any]:
        """Decode an upload and run `compute`."""
        image = await self.run_in_decoder(self.decode, upload, full)
        if isinstance(image, ImageError):
            return {"name": upload.name, "error": image.reason, "code": image.code}
        return {"name": upload.name, **await compute(image)}

    async def predict(self, image: DecodedUpload, top: int) -> list[dict[str, Any]]:
        """Return the `top` most probable classes."""
        probabilities = await self.batcher.submit(image.pixels, "predict")
        return [asdict(score) for score in top_predictions(torch.from_numpy(probabilities), self.labels, top).scores]

    async def explain(self, image: DecodedUpload, class_index: int, method: Method) -> dict[str, Any]:
        """Return the heatmap of a class: as numbers, where it lies on the image, and drawn over the image."""
        by_class = method in CLASS_METHODS  # the heatmap of other methods is the same for all classes
        heatmap = await self.batcher.submit(image.pixels, "explain", class_index if by_class else 0, method)
        png = await self.run_in_decoder(self.render_overlay, image, heatmap)
        values = [[round(float(v), 4) for v in row] for row in scale_to_unit(heatmap)]
        label, index = (self.labels[class_index], class_index) if by_class else (None, None)
        return {"label": label, "index": index, "method": method, "map": values, "box": image.box, "png": png}

    def render_overlay(self, image: DecodedUpload, heatmap: np.ndarray) -> str:
        """Draw a heatmap over the image; PNG in base64."""
        assert image.full_image is not None
        file = io.BytesIO()
        overlay_heatmap(image.full_image, heatmap, self.preprocess).save(file, "PNG")
        return base64.b64encode(file.getvalue()).decode()

    async def attention(self, image: DecodedUpload, layer: int, head: int | None) -> dict[str, Any]:
        """Return the attention map of a layer: one byte per weight, in base64."""
        config = self.checkpoint.config
        assert isinstance(config, ViTConfig)
        rows, columns = config.grid
        weights = await self.batcher.submit(image.pixels, "attention", layer, head)
        shape = {"layer": layer, "head": head, "rows": rows, "columns": columns, "prefix": config.num_prefix}
        return {**shape, "box": image.box, "values": base64.b64encode(weights.tobytes()).decode()}

    async def embed(self, image: DecodedUpload) -> list[float]:
        """Return the features that the head reads."""
        features = await self.batcher.submit(image.pixels, "embed")
        return [float(f"{value:.6g}") for value in features]

    async def run_while_connected(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`; cancel it if the client disconnects or the response timeout expires."""
        task = asyncio.ensure_future(work)
        disconnect = asyncio.ensure_future(request.receive())  # after the body, only a disconnect can arrive
        timeout = self.limits.response_timeout
        try:
            await asyncio.wait({task, disconnect}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if disconnect.done():
                raise ClientDisconnectedError
            raise Problem(504, f"There was no result within {timeout:g} seconds.", {"Retry-After": "1"})
        finally:
            disconnect.cancel()
            task.cancel()


def shrink_for_overlay(image: Image.Image) -> Image.Image:
    """Shrink a large image to `MAX_OVERLAY_PIXELS` and `MAX_OVERLAY_SIDE`."""
    width, height = image.size
    scale = min(1.0, math.sqrt(MAX_OVERLAY_PIXELS / (width * height)), MAX_OVERLAY_SIDE / max(width, height))
    if scale == 1:
        return image
    return image.resize((max(1, int(width * scale)), max(1, int(height * scale))), Image.Resampling.BOX)
