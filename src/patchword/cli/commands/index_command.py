"""`patchword index`: write the index of tar shards."""

from typing import Annotated

from ...core.text import pluralize, print_stderr
from ..arguments import positional
from ..model_args import Flag, JsonFlag
from ..output import EXIT_UNREADABLE, print_json, print_notes


def index(shards: Annotated[str, positional("SHARDS")], overwrite: Flag = False, json: JsonFlag = False) -> int:
    """Write the index of tar shards, so that runs start at once and read shards from front to back.

    Example: patchword index s3://bucket/shards

    Every shard is read once. The index is the file index.arrow beside the shards; training uses it by itself. Run it
    again after shards were added or changed. Exit code 3 means that a shard is damaged or has incomplete samples.

    Args:
        shards: folder with WebDataset shards (.tar), or its URL in an object store: s3://, gs:// or az://
        overwrite: replace an index that is out of date
    """
    from ...data.build_index import build_index

    report = build_index(shards, overwrite=overwrite)
    print_notes(report.notes)
    verb = "wrote" if report.written else "up to date:"
    size = f"{pluralize(report.num_samples, 'image')}, {pluralize(report.num_classes, 'class', 'es')}"
    print_stderr(f"{verb} {report.location}: {pluralize(len(report.shards), 'shard')}, {size}")
    if json:
        document = {
            "index": report.location,
            "written": report.written,
            "shards": len(report.shards),
            "images": report.num_samples,
            "classes": report.num_classes,
            "splits": report.samples_by_split(),
            "notes": [note.to_json() for note in report.notes],
        }
        print_json(document)
    is_incomplete = any(note.code in ("shard_damaged", "samples_left_out") for note in report.notes)
    return EXIT_UNREADABLE if is_incomplete else 0
