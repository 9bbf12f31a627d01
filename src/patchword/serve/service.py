"""From the bytes of pictures to answers: decoded in threads, computed by the batcher, while the client is there."""

import asyncio
import base64
import io
import math
import time
from collections.abc import Callable, Coroutine
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
from ..inference.decode import decode
from ..inference.predictions import class_labels, top_predictions
from ..inspection.explain import CLASS_METHODS, Method, methods_for
from ..plots.overlay import overlay_heatmap, scale_to_unit
from .batcher import Batcher
from .limits import Limits
from .middleware import ClientDisconnected
from .problem_json import Problem
from .prometheus import Metrics
from .uploads import Upload
from .worker import Worker

T = TypeVar("T")
NUM_DECODERS = 2
MAX_OVERLAY_SIDE = 4096  # pixels of a side of a picture with its map: a line of millions is no picture
WORKER_TIMEOUT_FACTOR = 2  # times the seconds for an answer: then the model's process is stuck
MAX_OVERLAY_PIXELS = 2_000_000  # pixels of a picture with its map; larger ones are shrunk to so many


@dataclass(frozen=True)
class DecodedUpload:
    """One upload: what the model sees of it, where on the picture that is, and the picture, if a map is to be drawn."""

    pixels: np.ndarray
    box: list[float]  # left, top, right, bottom, as parts of the picture's sides
    whole: Image.Image | None


class Service:
    """What the app's endpoints ask. Lives as long as the app."""

    def __init__(
        self, checkpoint: Checkpoint, engine: PreparedEngine, limits: Limits, meters: Metrics, num_threads: int | None
    ) -> None:
        assert checkpoint.preprocess is not None
        self.checkpoint, self.limits, self.meters, self.engine = checkpoint, limits, meters, engine.name
        self.preprocess: Preprocess = checkpoint.preprocess
        self.labels = class_labels(checkpoint)
        self.worker = Worker(checkpoint, engine, num_threads, WORKER_TIMEOUT_FACTOR * limits.answering, meters.restarted)
        self.decoders = ThreadPoolExecutor(NUM_DECODERS, thread_name_prefix="decode")
        self.decoding = asyncio.Semaphore(NUM_DECODERS)
        self.batcher = Batcher(self.worker, limits, meters)
        self.ready = False

    @property
    def methods(self) -> tuple[Method, ...]:
        return methods_for(self.checkpoint.config)

    async def warm_up(self) -> None:
        """The first answer takes longer, for which nobody should have to wait; the second tells the pace."""
        nothing = np.zeros((*self.preprocess.size, self.preprocess.channels), np.uint8)
        for _ in range(2):
            start = time.monotonic()
            await self.batcher.ask(nothing, "predict")
            self.batcher.seconds = time.monotonic() - start
        self.ready = True

    async def close(self) -> None:
        self.ready = False
        await self.batcher.close()
        self.worker.stop()
        self.decoders.shutdown(wait=False)

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """A place in the pool is held until the work is done, wanted or not, so that it cannot pile up."""
        await self.decoding.acquire()
        future = asyncio.get_running_loop().run_in_executor(self.decoders, function, *arguments)
        future.add_done_callback(lambda _: self.decoding.release())  # not here: this may be cancelled, even twice
        return await asyncio.shield(future)

    def decode(self, upload: Upload, whole: bool) -> DecodedUpload | ImageError:
        """The image, or why it cannot be read."""
        most = self.limits.pixels
        try:
            decoded = decode(upload.data, self.preprocess, full=whole, max_pixels=most)
        except ImageError as error:
            if error.code == "image_too_large":  # its reason names an argument, which a client does not have
                return ImageError(f"it has more pixels than the {most:,} allowed. Shrink it first.", code=error.code)
            return error
        width, height = decoded.image.size
        left, top, right, bottom = self.preprocess.crop_box(height, width)
        box = [round(v, 5) for v in (left / width, top / height, right / width, bottom / height)]
        return DecodedUpload(decoded.pixels, box, shrink_for_overlay(decoded.image) if whole else None)

    async def each(self, files: list[Upload], work: Any, whole: bool = False) -> list[dict[str, Any]]:
        """`work(picture)` for every file, at the same time; a file that cannot be read has an error instead."""
        self.batcher.admit(len(files))
        tasks = [asyncio.ensure_future(self.one(file, work, whole)) for file in files]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # where one failed, or the client left, the others are not wanted either
                task.cancel()
            self.batcher.release(len(files))

    async def one(self, file: Upload, work: Any, whole: bool) -> dict[str, Any]:
        picture = await self.in_thread(self.decode, file, whole)
        if isinstance(picture, ImageError):
            return {"name": file.name, "error": picture.reason, "code": picture.code}
        return {"name": file.name, **await work(picture)}

    async def predictions(self, picture: DecodedUpload, top: int) -> list[dict[str, Any]]:
        shares = await self.batcher.ask(picture.pixels, "predict")
        return [asdict(score) for score in top_predictions(torch.from_numpy(shares), self.labels, top).scores]

    async def explanation(self, picture: DecodedUpload, label: int, method: Method) -> dict[str, Any]:
        """The map as numbers, where it lies on the picture, and the picture with the map over it."""
        heat = await self.batcher.ask(picture.pixels, "heat", label if method in CLASS_METHODS else 0, method)
        drawn = await self.in_thread(self.drawn, picture, heat)
        values = [[round(float(v), 4) for v in row] for row in scale_to_unit(heat)]
        asked = method in CLASS_METHODS  # the other ways know no class: their map is the same for all
        about = {"label": self.labels[label] if asked else None, "index": label if asked else None, "method": method}
        return {**about, "map": values, "box": picture.box, "png": drawn}

    def drawn(self, picture: DecodedUpload, heat: np.ndarray) -> str:
        assert picture.whole is not None
        file = io.BytesIO()
        overlay_heatmap(picture.whole, heat, self.preprocess).save(file, "PNG")
        return base64.b64encode(file.getvalue()).decode()

    async def attention(self, picture: DecodedUpload, layer: int, head: int | None) -> dict[str, Any]:
        config = self.checkpoint.config
        assert isinstance(config, ViTConfig)
        rows, columns = config.grid
        weights = await self.batcher.ask(picture.pixels, "attention", layer, head)
        about = {"layer": layer, "head": head, "rows": rows, "columns": columns, "prefix": config.num_prefix}
        return {**about, "box": picture.box, "values": base64.b64encode(weights.tobytes()).decode()}

    async def while_connected(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """The result, unless the client leaves or the time is over; then the work is given up."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(request.receive())  # after the body, only a disconnect can come
        try:
            await asyncio.wait({task, gone}, timeout=self.limits.answering, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if gone.done():
                raise ClientDisconnected
            raise Problem(504, f"There was no answer within {self.limits.answering:g} seconds.", {"Retry-After": "1"})
        finally:
            gone.cancel()
            task.cancel()


def shrink_for_overlay(picture: Image.Image) -> Image.Image:
    scale = min(1.0, math.sqrt(MAX_OVERLAY_PIXELS / (picture.width * picture.height)), MAX_OVERLAY_SIDE / max(picture.size))
    if scale == 1:
        return picture
    return picture.resize(
        (max(1, int(picture.width * scale)), max(1, int(picture.height * scale))), Image.Resampling.BOX
    )
