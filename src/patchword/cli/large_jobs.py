"""Large jobs of `predict` and `embed`: --out with a directory or URL, and --ray."""

import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from ..core.progress import rate_progress, working
from ..core.text import escape_unprintable, pluralize, print_stderr
from ..errors import ConfigError
from .arguments import arg
from .output import EXIT_UNREADABLE, print_json, print_notes

if TYPE_CHECKING:
    from ..inference.prediction_job import JobRequest

RayAddress = Annotated[
    str | None,
    arg(
        "ADDRESS",
        "with --out DIR: compute on a Ray cluster: auto (the cluster of this machine), HOST:PORT, or local, which "
        "starts Ray here",
    ),
]
ChunkSize = Annotated[int | None, arg("N", "with --out DIR: images in a part (default: 4096)")]


def run_large_job(request: "JobRequest", ray: str | None, json: bool) -> int:
    """Start or continue a job, and print its summary; the exit code is 3 if images could not be read."""
    from ..inference.prediction_job import finish_job, open_job, run_locally

    start = time.monotonic()
    run = run_locally
    if ray is not None:
        from ..cluster.ray import check_address, run_on_ray

        check_address(ray)
        run = partial(run_on_ray, ray)
    what = "measuring engines and listing the images" if request.engine == "auto" else "listing the images"
    with working(what):
        job = open_job(request)
    print_notes(job.notes)
    if request.engine == "auto":
        print_stderr(f"engine: {job.manifest.settings['engine']}")
    pending = job.manifest.num_chunks - len(job.done)
    if job.was_started:
        print_stderr(f"{len(job.done):,} of {pluralize(job.manifest.num_chunks, 'part')} are complete already")
    if pending:
        title = "predicting" if request.task == "predict" else "embedding"
        with rate_progress(title, job.manifest.num_images, job.num_done) as add:
            run(job, add)
    with working("checking the parts"):
        summary = finish_job(job)
    created = [result.num_images for result in job.results if result.created]
    seconds = time.monotonic() - start
    print_stderr(f"wrote {request.out}: {pluralize(summary['parts'], 'part')}, {pluralize(summary['images'], 'image')}")
    if json:
        document: dict[str, Any] = {"out": request.out, **summary}
        document |= {"created": len(created), "created_images": sum(created), "seconds": round(seconds, 1)}
        print_json(document)
    return report_errors(summary)


def report_errors(summary: dict[str, Any]) -> int:
    """List images that could not be read on standard error, and return the exit code."""
    if not summary["errors"]:
        return 0
    for row in summary["unreadable"]:
        print_stderr(escape_unprintable(row["error"]))
    if summary["errors"] > len(summary["unreadable"]):
        print_stderr(f"... and {summary['errors'] - len(summary['unreadable']):,} more")
    counts = ", ".join(f"{code}: {count:,}" for code, count in summary["error_codes"].items())
    print_stderr(f"{summary['errors']:,} of {summary['images']:,} images could not be read ({counts}).")
    return EXIT_UNREADABLE


def require_large_job(out: str | None, ray: str | None, chunk_size: int | None) -> None:
    """Refuse options of large jobs without one."""
    if out is None:
        for flag, value in (("--ray", ray), ("--chunk-size", chunk_size)):
            if value is not None:
                raise ConfigError(f"{flag} needs --out with a directory or a URL, where the parts are written.")
