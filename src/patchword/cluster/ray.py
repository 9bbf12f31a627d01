"""Run the chunks of a large job on a Ray cluster, or on a Ray of this machine alone.

Ray places the chunks, restarts what dies and moves work away from lost nodes. It does not make the output correct:
parts are only created, never changed (`inference.prediction_parts`), so a chunk that Ray runs twice changes nothing.
Only numbers of chunks go through Ray's object store, and the weights once; workers read images and write parts.
"""

import contextlib
import logging
import os
import socket
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from ..checkpoints import Checkpoint
from ..core.runtime import StopSignal, available_cores, set_num_threads
from ..core.text import one_line
from ..data.storage import open_storage
from ..errors import ConfigError, DataError, PatchwordError, StorageError, how_to_install
from ..inference.chunk_process import MAX_DEATHS, ChunkProcess
from ..inference.prediction_job import Job, check_machine, stopped
from ..inference.prediction_manifest import Manifest
from ..inference.prediction_parts import ChunkModel, ChunkResult, part_key, predict_chunk

CPUS_PER_ACTOR = 4  # at most: threads of one process share the weights, but also the interpreter
OBJECT_STORE_BYTES = 150 * 2**20  # of a Ray on this machine: it holds numbers, and the weights (larger ones spill)
# A task is tried again when its actor or node dies. Not for ever, as is Ray Data's default: with a chunk that kills
# whatever computes it, the job would never end. More than MAX_DEATHS, because losing nodes is not the fault of a chunk.
MAX_TASK_RETRIES = 12
MAX_BLOCKS = 10_000  # tasks of one job; beyond, a task computes several chunks
SECONDS_PER_POLL = 0.5
CONNECT_TIMEOUT = 5.0
COLLECT_TIMEOUT = 10.0
AUTO_ADDRESS, LOCAL_ADDRESS = "auto", "local"  # starts a Ray on this machine


def check_address(address: str) -> None:
    """Check that Ray is installed and that something listens, before anything is listed: `ray.init` tries for minutes.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster (code "ray_unreachable").
    """
    try:
        import ray.data  # noqa: F401
    except ImportError:
        raise ConfigError(f"--ray needs the package ray: {how_to_install('cluster')}.") from None
    if address in (LOCAL_ADDRESS, AUTO_ADDRESS):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT).close()
    except (OSError, ValueError, OverflowError) as error:
        raise _no_cluster(address, error) from None


def _no_cluster(address: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"--ray {address}: there is no Ray cluster ({one_line(error)}). Start one (ray start --head), or use --ray "
        f"{LOCAL_ADDRESS}.",
        code="ray_unreachable",
    )


def run_on_ray(address: str, job: Job, on_progress: Callable[[int], object]) -> None:
    """Compute the missing chunks of a job on Ray; a runner of `inference.prediction_job`.

    Args:
        address: "auto" for the cluster of this machine, "local" to start Ray here, or HOST:PORT.
        job: The job.
        on_progress: Called with the number of images that were computed since its last call.

    Raises:
        ConfigError: There is no cluster (code "ray_unreachable").
        Stopped: After SIGTERM or SIGINT. Complete parts stay.
    """
    with _connect(address), StopSignal() as stop:
        import ray

        tracker = ray.remote(num_cpus=0)(_Tracker).options(scheduling_strategy=_this_node()).remote()
        collector, failed = _Collector(job, tracker, on_progress), list[BaseException]()

        def run() -> None:
            try:
                _run_pipeline(job, tracker)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run, daemon=True)  # it ends with ray.shutdown
        thread.start()
        while thread.is_alive() and stop.signal is None:
            thread.join(SECONDS_PER_POLL)
            collector.collect()
        if stop.signal is not None:
            raise stopped(job, stop.signal)
        if failed:
            raise _explain(job, failed[0])


def _this_node() -> Any:
    """Pin an actor to the node of the driver, so that it lives as long as the driver."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def _run_pipeline(job: Job, tracker: Any) -> None:
    import ray
    import ray.data

    weights = ray.put(job.request.checkpoint)
    pending = [{"chunk": number} for number in job.pending()]
    num_cpus, max_actors = _size_pool(len(pending))
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.log_internal_stack_trace_to_stdout = False
    chunks = ray.data.from_items(pending, override_num_blocks=min(len(pending), MAX_BLOCKS))
    with warnings.catch_warnings():
        # The retries of actors have no named parameters before Ray 2.64, where this form ends.
        warnings.simplefilter("ignore")
        results = chunks.map_batches(
            Predictor,
            fn_constructor_args=([weights], job.manifest.storage.url, tracker, num_cpus),
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=max_actors),
            batch_size=1,
            num_cpus=num_cpus,
            max_restarts=-1,  # of actors: each restart belongs to a retry, which is bounded
            max_task_retries=MAX_TASK_RETRIES,
        )
    for result in results.iter_rows():
        if result["code"] or result["message"]:
            raise StorageError(result["message"], code=result["code"] or None)


def _size_pool(num_chunks: int) -> tuple[int, int]:
    """Return the CPUs of an actor, and how many actors the cluster can hold; an autoscaler may add nodes later."""
    import ray

    nodes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    cpus = [int(count) for count in nodes if count >= 1]
    if not cpus:
        raise ConfigError("The Ray cluster has no CPUs. Start nodes with CPUs: ray start --address HOST:PORT.")
    num_cpus = min(CPUS_PER_ACTOR, min(cpus))
    return num_cpus, max(1, min(num_chunks, sum(count // num_cpus for count in cpus) * 4))


class _Collector:
    """Asks the tracker what has been computed. A response that is lost or late is not missed: the next has it, too."""

    def __init__(self, job: Job, tracker: Any, on_progress: Callable[[int], object]) -> None:
        self.job, self.tracker, self.on_progress = job, tracker, on_progress
        self.images = self.num_results = 0

    def collect(self) -> None:
        """Report new images, and add new results to the job."""
        import ray

        try:
            images, results = ray.get(self.tracker.read.remote(self.num_results), timeout=COLLECT_TIMEOUT)
        except ray.exceptions.RayError:
            return  # busy, or the cluster is ending; parts are counted at the end anyway
        self.on_progress(images - self.images)
        self.job.results += results
        self.images = images
        self.num_results += len(results)


def _explain(job: Job, error: BaseException) -> BaseException:
    """Convert an error of Ray to a sentence; the job can be continued."""
    if isinstance(error, PatchwordError):
        return error
    return DataError(
        f"Ray gave up ({type(error).__name__}: {one_line(error)}). Complete parts stay in {job.request.out}. Check the "
        f"cluster (ray status), then type the same command again.",
        code="ray_failed",
    )


class _Tracker:
    """Counts what the actors do: images, results, and how often each chunk was started. It lives beside the driver."""

    def __init__(self) -> None:
        self.starts: Counter[int] = Counter()
        self.unfinished: Counter[int] = Counter()  # images of chunks that are computed
        self.images = 0
        self.results: list[ChunkResult] = []

    def start(self, number: int) -> int:
        """Return how often this chunk was started before."""
        self.images -= self.unfinished.pop(number, 0)  # of an actor that died: they are computed again
        self.starts[number] += 1
        return self.starts[number] - 1

    def add(self, number: int, images: int) -> None:
        self.images += images
        self.unfinished[number] += images

    def finish(self, result: ChunkResult) -> None:
        self.unfinished.pop(result.number, 0)
        self.results.append(result)

    def read(self, first: int) -> tuple[int, list[ChunkResult]]:
        """Return the number of all images so far, and the results from the given one on."""
        return self.images, self.results[first:]


class Predictor:
    """An actor of the pool: holds the model, and computes one chunk at a time."""

    def __init__(self, weights: list[Any], out: str, tracker: Any, num_cpus: int) -> None:
        import ray

        set_num_threads(num_cpus)  # Ray sets OMP_NUM_THREADS, which torch may have read before
        self.checkpoint: Checkpoint = ray.get(weights[0])
        self.out, self.tracker, self.num_cpus = out, tracker, num_cpus
        manifest = Manifest.read(open_storage(out))
        if manifest is None:
            raise RuntimeError(f"This node does not see {out}: use a shared directory or an object store.")
        self.manifest = manifest
        self.model: ChunkModel | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        code = message = ""
        number = int(batch["chunk"][0])
        try:
            if self.model is None:
                check_machine(self.manifest)
            self.compute(number)
        except PatchwordError as error:  # returned, because Ray would wrap it and try again
            code, message = error.code, str(error)
        return {"chunk": [number], "code": [code], "message": [message]}

    def compute(self, number: int) -> None:
        """Compute a chunk, unless its part exists: this may be a retry of a task that had got further."""
        import ray

        if self.manifest.storage.head(part_key(number)) is not None:
            self.tracker.add.remote(number, self.manifest.chunk_length(number))
            return
        if ray.get(self.tracker.start.remote(number)) >= MAX_DEATHS:
            with ChunkProcess(self.out, self.checkpoint, self.num_cpus) as process:
                result = process.compute_safely(number, deaths=MAX_DEATHS - 1)
            self.tracker.add.remote(number, result.num_images)
        else:
            self.model = self.model or ChunkModel.open(self.checkpoint, self.manifest.settings)
            report = _Report(self.tracker, number)
            result = predict_chunk(self.model, self.manifest, number, on_image=report.count_image)
            report.flush()
        self.tracker.finish.remote(result)


class _Report:
    """Counts images, and sends the count to the tracker now and then."""

    def __init__(self, tracker: Any, number: int) -> None:
        self.tracker, self.number = tracker, number
        self.images, self.sent = 0, time.monotonic()

    def count_image(self) -> None:
        self.images += 1
        if time.monotonic() - self.sent > SECONDS_PER_POLL:
            self.flush()

    def flush(self) -> None:
        self.tracker.add.remote(self.number, self.images)
        self.images, self.sent = 0, time.monotonic()


@contextlib.contextmanager
def _connect(address: str) -> Iterator[None]:
    """Connect to a cluster, or start a Ray on this machine, without dashboard and usage statistics."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # it logs each restart as an error
    try:
        import ray
        import ray.data
    except ImportError:
        raise ConfigError(f"--ray needs the package ray: {how_to_install('cluster')}.") from None
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == LOCAL_ADDRESS:
        options |= {"num_cpus": available_cores(), "object_store_memory": OBJECT_STORE_BYTES}
        options["include_dashboard"] = False
    try:
        ray.init(address, **options)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise _no_cluster(address, error) from None
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # Ray prints the deaths of raylets to standard output
            yield
    finally:
        ray.shutdown()
