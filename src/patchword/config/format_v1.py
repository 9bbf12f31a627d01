"""Reads format version 1 of model.json and config.json, which patchword 0.1 wrote.

Documents are upgraded when they are read; nothing else knows the old names of fields.
"""

from typing import Any

MODEL_FIELDS = {
    "attention": "attention_pattern",
    "checkpoint_blocks": "grad_checkpointing",
    "local_start": "local_attention_init",
    "position_prefix": "pos_embed_prefix",
    "position_resample": "pos_embed_resample",
    "positions": "pos_embed",
    "standardisation": "weight_standardization",
    "window": "window_size",
}
RUN_FIELDS = {
    "accumulate": "grad_accum_steps",
    "evaluate_every": "eval_every",
    "flip_test": "tta_flip",
    "head": "head_init",
    "keep": "keep_last",
    "log": "loggers",
    "lora": "lora_rank",
    "threads": "num_threads",
}
SECTION_FIELDS = {
    "model": MODEL_FIELDS,
    "data": {"balanced": "balanced_sampling", "memory": "cache_gib", "workers": "num_workers"},
    "augment": {
        "colour": "color_jitter",
        "erase": "random_erasing",
        "magnitude": "randaug_magnitude",
        "operations": "randaug_ops",
        "shift": "shift_limit",
    },
    "optim": {"clip": "clip_grad_norm", "head_lr": "head_lr_scale", "sam": "sam_rho"},
    "schedule": {"cooldown": "cooldown_fraction", "final": "min_lr_ratio", "warmup": "warmup_fraction"},
}
RESIZE_FIELDS = {"early_scale": "scale", "early_part": "fraction"}  # now in the section progressive_resize


def upgrade_model(document: dict[str, Any]) -> dict[str, Any]:
    """Renames the keys of a model.json of version 1 to those of version 2."""
    renamed = rename_keys(document, {"several": "multi_label"})
    if isinstance(renamed.get("config"), dict):
        renamed["config"] = split_dropout(rename_keys(renamed["config"], MODEL_FIELDS))
    return renamed


def upgrade_run(config: dict[str, Any]) -> dict[str, Any]:
    """Renames the keys of a run's config of version 1 to those of version 2."""
    renamed = rename_keys(config, RUN_FIELDS)
    for section, fields in SECTION_FIELDS.items():
        if isinstance(renamed.get(section), dict):
            renamed[section] = rename_keys(renamed[section], fields)
    if isinstance(renamed.get("model"), dict):
        renamed["model"] = split_dropout(renamed["model"])
    resize = {new: renamed.pop(old) for old, new in RESIZE_FIELDS.items() if old in renamed}
    if resize:
        renamed["progressive_resize"] = resize
    if isinstance(renamed.get("start_share"), int | float):  # it weighted the initial weights
        renamed["wise_ft_alpha"] = 1 - renamed.pop("start_share")
    return renamed


def split_dropout(model: dict[str, Any]) -> dict[str, Any]:
    """Adds attention_dropout, which was part of dropout in version 1."""
    return {**model, "attention_dropout": model["dropout"]} if "dropout" in model else model


def rename_keys(values: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Renames keys; those without a new name stay."""
    return {names.get(key, key): value for key, value in values.items()}
