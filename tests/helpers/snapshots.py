"""Snapshots: small JSON files under tests/snapshots/ that pin what patchword computes and which keys it prints.

A refactoring must not change them. PATCHWORD_UPDATE_SNAPSHOTS=1 rewrites the snapshot of every test that is run:

    PATCHWORD_UPDATE_SNAPSHOTS=1 pytest tests/test_snapshots.py

Floating-point results depend on the CPU in their last bits. So every numeric snapshot holds the values, which must
agree everywhere to a tolerance, and one digest per kind of CPU on which they must agree bit for bit. An update on
another kind of CPU that agrees with the stored values only adds its digest.
"""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SNAPSHOTS = Path(__file__).parents[1] / "snapshots"
UPDATE = os.environ.get("PATCHWORD_UPDATE_SNAPSHOTS") == "1"

# Snapshots keep the names that they were taken with. Every rename of a JSON key since then is listed here, old name ->
# new name, and applied to what is stored before it is compared. A new name may go one level down ("resize.scale").
# A rename in one document only is written "document:path.to.old" -> "new", with the old names in the path and without
# "[]": "evaluate:comparison.first".
RENAMED_KEYS: dict[str, str] = {
    "inspect:colours": "patch_colors",
    "inspect:colours.colours": "colors",
    "inspect:trust": "faithfulness",
    "inspect:walk": "walkthrough",
    "inspect:walk.embedded": "patch_embeddings",
    "inspect:walk.entering": "tokens",
    "accumulate": "grad_accum_steps",
    "agreement": "parity",
    "balanced": "balanced_sampling",
    "bench:agreement.divergence": "kl_divergence",
    "bench:agreement.largest": "max_abs_diff",
    "bench:agreement.pictures": "num_images",
    "bench:agreement.relative": "max_rel_diff",
    "bench:agreement.same": "top1_agreement",
    "bench:mebibytes": "memory_mib",
    "bench:seconds": "load_seconds",
    "bench:size": "file_mib",
    "bench:timings.batch": "batch_size",
    "bench:timings.median": "median_ms",
    "bench:timings.p95": "p95_ms",
    "bench:timings.p99": "p99_ms",
    "bench:timings.per_second": "images_per_second",
    "bench:timings.rounds": "num_rounds",
    "checkpoint_blocks": "grad_checkpointing",
    "clip": "clip_grad_norm",
    "colour": "color_jitter",
    "convert:config.attention": "attention_pattern",
    "cooldown": "cooldown_fraction",
    "doctor:what": "message",
    "doctor:where": "details",
    "early_part": "progressive_resize.fraction",
    "early_scale": "progressive_resize.scale",
    "erase": "random_erasing",
    "evaluate:part": "split",
    "evaluate_corruptions:corruptions.kept": "retained",
    "evaluate_corruptions:part": "split",
    "evaluate_every": "eval_every",
    "export:agreement.divergence": "kl_divergence",
    "export:agreement.largest": "max_abs_diff",
    "export:agreement.pictures": "num_images",
    "export:agreement.relative": "max_rel_diff",
    "export:agreement.same": "top1_agreement",
    "export:merged": "merge_counts",
    "export:whole": "include_preprocessing",
    "final": "min_lr_ratio",
    "flip_test": "tta_flip",
    "head_lr": "head_lr_scale",
    "keep": "keep_last",
    "local_start": "local_attention_init",
    "log": "loggers",
    "lora": "lora_rank",
    "magnitude": "randaug_magnitude",
    "memory": "cache_gib",
    "operations": "randaug_ops",
    "patchword_abandoned_created": "patchword_images_abandoned_created",
    "patchword_abandoned_total": "patchword_images_abandoned_total",
    "patchword_batch_pictures": "patchword_batch_images",
    "patchword_batch_pictures_created": "patchword_batch_images_created",
    "patchword_pictures_inside": "patchword_images_in_flight",
    "patchword_refused_created": "patchword_requests_rejected_created",
    "patchword_refused_total": "patchword_requests_rejected_total",
    "patchword_seconds": "patchword_request_duration_seconds",
    "position_prefix": "pos_embed_prefix",
    "position_resample": "pos_embed_resample",
    "positions": "pos_embed",
    "probe:left_out": "skipped_shots",
    "probe:neighbours": "knn",
    "probe:part": "split",
    "run_config:config.head": "head_init",
    "run_config:config.model.attention": "attention_pattern",
    "run_model:config.attention": "attention_pattern",
    "run_state:notes.told": "messages",
    "sam": "sam_rho",
    "serve_model:config.attention": "attention_pattern",
    "serve_model:limits.answering": "response_timeout",
    "serve_model:limits.batch": "batch_size",
    "serve_model:limits.bodies": "max_total_body_bytes",
    "serve_model:limits.body": "max_body_bytes",
    "serve_model:limits.files": "max_files",
    "serve_model:limits.pixels": "max_pixels",
    "serve_model:limits.queue": "queue_size",
    "serve_model:limits.sending": "receive_timeout",
    "several": "multi_label",
    "shift": "shift_limit",
    "standardisation": "weight_standardization",
    "start_share": "wise_ft_alpha",
    "study_plan:share": "seconds_per_run",
    "study_results:rows.part": "split",
    "threads": "num_threads",
    "warmup": "warmup_fraction",
    "window": "window_size",
    "workers": "num_workers",
}
# Every key that documents got since then, with its type: "document:[].path.to.key" -> "number", in the new names.
ADDED_KEYS: dict[str, str] = {
    "doctor:[].code": "string",
    "convert:config.attention_dropout": "number",
    "run_config:config.data.lanes": "integer",
    "run_config:config.data.shard_cache_gib": "number",
    "run_config:config.data.shuffle_window": "integer",
    "run_config:config.model.attention_dropout": "number",
    "run_model:config.attention_dropout": "number",
    "serve_model:config.attention_dropout": "number",
    "predict:[].code": "string",
    "export:unreadable": "array",
    "serve_attention:results[].code": "string",
    "serve_embed:results[].code": "string",
    "serve_explain:results[].code": "string",
    "serve_problem:code": "string",
    "serve_predict:results[].code": "string",  # error codes: control flow must not depend on wording
}


def cpu_kind() -> str:
    """What decides the last bits of a result: the processor, the instructions that torch uses on it, and torch."""
    fields = dict(line.split(":", 1) for line in cpu_lines() if ":" in line)
    names = ("vendor_id", "cpu family", "model")
    model = " ".join(fields[name].strip() for name in names if name in fields) or platform.processor()
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return [line.replace("\t", "") for line in path.read_text().split("\n\n")[0].splitlines()] if path.exists() else []


def read(name: str) -> Any:
    path = SNAPSHOTS / f"{name}.json"
    assert path.exists(), f"{path} is missing; PATCHWORD_UPDATE_SNAPSHOTS=1 writes it"
    return json.loads(path.read_text())


def write(name: str, content: Any) -> None:
    (SNAPSHOTS / f"{name}.json").write_text(json_lines(content) + "\n")


def json_lines(content: Any, depth: int = 2) -> str:
    """JSON with a line for each entry down to `depth`: a diff shows what changed, and files stay small."""
    if isinstance(content, dict) and depth and content:
        indent = " " * (3 - depth)
        rows = [f"{indent}{json.dumps(k)}: {json_lines(v, depth - 1)}" for k, v in content.items()]
        return "{\n" + ",\n".join(rows) + "\n" + indent[1:] + "}"
    if isinstance(content, list) and depth and content and isinstance(content[0], dict):
        indent = " " * (3 - depth)
        return "[\n" + ",\n".join(indent + json.dumps(each) for each in content) + "\n" + indent[1:] + "]"
    return json.dumps(content)


def check_exact(name: str, found: dict[str, Any]) -> None:
    """Plain data, equal on every machine; the message names the entries that differ."""
    if UPDATE:
        write(name, found)
    stored = {renamed(name, [key]): value for key, value in read(name).items()}
    wrong = [key for key in {**stored, **found} if stored.get(key) != found.get(key)]
    assert not wrong, f"{name}: {len(wrong)} entries differ: " + "; ".join(
        f"{key} was {stored.get(key)!r}, is {found.get(key)!r}" for key in wrong[:5]
    )


# Arrays: logits, tokens, gradients.

SAMPLED = 12  # values stored of each array, evenly spaced
TOLERANCE = 1e-5  # absolute, and relative to the largest value of the array


def check_arrays(name: str, found: dict[str, Tensor]) -> None:
    """float32 arrays: sampled values to TOLERANCE, and all bits where this kind of CPU has a digest."""
    arrays = {key: array.detach().contiguous() for key, array in found.items()}
    assert all(array.dtype == torch.float32 for array in arrays.values())
    digests = {key: hashlib.sha256(a.numpy().tobytes()).hexdigest()[:16] for key, a in arrays.items()}
    values = {key: {"shape": list(a.shape), "values": sample(a)} for key, a in arrays.items()}
    if UPDATE:
        update(name, values, digests, array_differences)
    stored = read(name)
    assert not (wrong := array_differences(stored["values"], values)), f"{name}: {wrong[:5]}"
    check_digests(name, stored["digests"], digests)


def sample(array: Tensor) -> list[float]:
    flat = array.flatten()
    places = torch.linspace(0, len(flat) - 1, min(SAMPLED, len(flat))).long()
    return [float(f"{value:.7g}") for value in flat[places].tolist()]


def array_differences(stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
    wrong = [f"{key} is {'new' if key in found else 'missing'}" for key in stored.keys() ^ found.keys()]
    for key in stored.keys() & found.keys():
        old, new = stored[key], found[key]
        if old["shape"] != new["shape"]:
            wrong.append(f"{key} has shape {new['shape']}, had {old['shape']}")
            continue
        allowed = TOLERANCE * (1 + max(map(abs, old["values"])))
        distance = max(abs(a - b) for a, b in zip(old["values"], new["values"], strict=True))
        if not distance <= allowed:
            wrong.append(f"{key} differs by {distance:.2g}, more than {allowed:.2g}")
    return wrong


# Rows: metrics.jsonl.


def check_rows(name: str, found: dict[str, list[dict[str, Any]]], close: Callable[[Any, Any, str, int], bool]) -> None:
    """Runs as rows of numbers: `close(stored, found, key, step)` everywhere, all bits where this CPU has a digest."""

    def differences(stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
        wrong = [f"{run} is {'new' if run in found else 'missing'}" for run in stored.keys() ^ found.keys()]
        for run in stored.keys() & found.keys():
            wrong += row_differences(run, renamed_keys(name, stored[run]), found[run], close)
        return wrong

    digests = {
        run: hashlib.sha256(json.dumps(values_of(rows)).encode()).hexdigest()[:16] for run, rows in found.items()
    }
    if UPDATE:
        update(name, found, digests, differences)
    stored = read(name)
    assert not (wrong := differences(stored["values"], found)), f"{name}: {wrong[:5]}"
    check_digests(name, stored["digests"], digests)


def values_of(rows: list[dict[str, Any]]) -> list[Any]:
    """Without the keys, which may be renamed; `row_differences` has seen that they and their order are the same."""
    return [list(row.values()) for row in rows]


def row_differences(
    run: str, stored: list[dict[str, Any]], found: list[dict[str, Any]], close: Callable[[Any, Any, str, int], bool]
) -> list[str]:
    wrong = []
    for old, new in zip(stored, found, strict=False):
        if list(old) != list(new):
            wrong.append(f"{run}: keys {list(new)}, were {list(old)}")
            continue
        where = f"{run}, {new['kind']} row of step {new['step']}"
        wrong += [
            f"{where}: {key} is {new[key]!r}, was {old[key]!r}"
            for key in old
            if not close(old[key], new[key], key, new["step"])
        ]
    return wrong + [f"{run}: {len(found)} rows, were {len(stored)}"] * (len(stored) != len(found))


# Digests of arrays and rows, by kind of CPU.


def update(name: str, values: Any, digests: dict[str, str], differences: Callable[[Any, Any], list[str]]) -> None:
    """Values that agree with the stored ones stay as they are, and so do other CPUs' digests."""
    stored = read(name) if (SNAPSHOTS / f"{name}.json").exists() else {"digests": {}, "values": {}}
    if differences(stored["values"], values):
        stored = {"digests": {}, "values": values}
    stored["digests"][cpu_kind()] = digests
    write(name, stored)


def check_digests(name: str, stored: dict[str, dict[str, str]], found: dict[str, str]) -> None:
    if expected := stored.get(cpu_kind()):
        wrong = [key for key in {**expected, **found} if expected.get(key) != found.get(key)]
        assert not wrong, f"{name}: equal to the tolerance, but not bit for bit: {', '.join(wrong[:10])}"


# Schemas: the keys of JSON documents and the types behind them.


def check_schema(document: str, content: Any, data_keys: tuple[str, ...] = ()) -> None:
    """Key paths and JSON types of a document. `data_keys`: paths of objects whose keys are data, such as labels."""
    found = schema_of(content, data_keys)
    if UPDATE:
        write(f"schemas/{document}", found)
    stored = renamed_paths(document, read(f"schemas/{document}"))
    lines = [f"- {path}: {kind}" for path, kind in stored.items() if found.get(path) != kind]
    lines += [f"+ {path}: {kind}" for path, kind in found.items() if stored.get(path) != kind]
    assert not lines, f"the schema of {document} changed (list renames in RENAMED_KEYS):\n" + "\n".join(lines)


def schema_of(content: Any, data_keys: tuple[str, ...] = ()) -> dict[str, str]:
    """{"[].predictions[].label": "string"}; elements of a list are merged, several types are joined by "|"."""
    kinds: dict[str, set[str]] = {}
    for path, kind in visited(content, "", data_keys):
        kinds.setdefault(path or ".", set()).add(kind)
    return {path: "|".join(sorted(kinds[path])) for path in sorted(kinds)}


TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


def visited(content: Any, path: str, data_keys: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    yield path, "null" if content is None else TYPES[type(content)]
    if isinstance(content, dict):
        for key, value in content.items():
            name = "*" if path in data_keys else key
            yield from visited(value, f"{path}.{name}" if path else name, data_keys)
    if isinstance(content, list):
        for value in content:
            yield from visited(value, f"{path}[]", data_keys)


def renamed_paths(document: str, schema: dict[str, str]) -> dict[str, str]:
    """A stored schema with RENAMED_KEYS and ADDED_KEYS applied."""
    result = {renamed_path(document, path): kind for path, kind in schema.items()}
    assert len(result) == len(schema), f"{document}: RENAMED_KEYS gives two keys the same name"
    for path in list(result):
        parent, _, _ = path.rpartition(".")
        if parent and not parent.endswith("[]"):  # a new level, if a key went one down
            result.setdefault(parent, "object")
    own = {key.partition(":")[2]: kind for key, kind in ADDED_KEYS.items() if key.startswith(f"{document}:")}
    return {**result, **own}


def unused_renames() -> list[str]:
    """Entries of RENAMED_KEYS that name nothing in any snapshot: typing errors, or renames that were taken back."""
    known: set[str] = set()
    for path in SNAPSHOTS.rglob("*.json"):
        for key in keys_of(json.loads(path.read_text())):
            bare = key.replace("[]", "").strip(".").split(".")
            known |= {f"{path.stem}:{'.'.join(bare[: place + 1])}" for place in range(len(bare))} | set(bare)
            known.add(key)  # one that has a dot in itself
    return [key for key in RENAMED_KEYS if key not in known]


def keys_of(content: Any) -> Iterator[str]:
    """All keys of nested objects, and the names of the parameters of an OpenAPI document."""
    if isinstance(content, dict):
        yield from content
        yield from [content["name"]] if "in" in content else []
    for value in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from keys_of(value)


def renamed_path(document: str, path: str) -> str:
    old = path.split(".")
    return ".".join(renamed(document, old[: place + 1]) for place in range(len(old)))


def renamed(document: str, path: list[str]) -> str:
    """The new name of the last key of a path."""
    bare = [component.replace("[]", "") for component in path]
    new = RENAMED_KEYS.get(f"{document}:{'.'.join(filter(None, bare))}", RENAMED_KEYS.get(bare[-1], bare[-1]))
    return new + "[]" * path[-1].count("[]")


def renamed_keys(document: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{renamed(document, [key]): value for key, value in row.items()} for row in rows]


def check_openapi(found: dict[str, Any]) -> None:
    """A whole OpenAPI document; RENAMED_KEYS also renames the parameters of a request."""
    if UPDATE:
        write("openapi", found)
    stored = renamed_openapi(read("openapi"))
    assert found == stored, "the OpenAPI document changed (list renames in RENAMED_KEYS)"


def renamed_openapi(content: Any) -> Any:
    if isinstance(content, dict):
        result = {renamed("openapi", [key]): renamed_openapi(value) for key, value in content.items()}
        if "in" in content:  # a parameter
            result["name"] = renamed("openapi", [content["name"]])
        return result
    return [renamed_openapi(each) for each in content] if isinstance(content, list) else content
