"""Which results are older than the code they measure: `python benchmarks/stale.py`, or `make stale`.

For each results/*.json: commits since its own, and how many of those changed the measured files. A commit counts
only if a Python file's syntax tree without docstrings changed; comments, formatting and moved but unchanged files
do not count, renamed identifiers do. `--check` fails on a result without an entry in SOURCES, an entry without a
result, or a commit that is not in the history.
"""

import argparse
import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TRAINING = ("training", "models", "data", "metrics", "recipes")
INFERENCE = ("inference", "models", "data")
TEXT_FILES = ("recurrent", "transformer", "fit", "greedy_decoding", "tasks", "vocabulary", "cmudict")
TEXT = (*(f"lineage/{name}.py" for name in TEXT_FILES), "studies/text_studies.py")
BERT = ("lineage", "models", "studies/bert_study.py")
EQUIVARIANCE = ("models", "inspection/capture.py", "studies/equivariance.py")
RESNETS = ("studies/resnet_attention.py", *TRAINING)
SOURCES: dict[str, tuple[str, tuple[str, ...]]] = {
    "attention": ("attention", TRAINING),
    "attention_former": ("attention", TRAINING),
    "budget_soak": ("budget_soak", ("training", "data")),
    "calibration": ("calibration", ("metrics", "evaluation", *INFERENCE)),
    "cifar10_finetune_24m": ("trained", (*TRAINING, "checkpoints")),
    "cifar10_scratch_100m": ("trained", TRAINING),
    "cifar10_scratch_30m_seed0": ("trained", TRAINING),
    "cifar10_scratch_30m_seed1": ("trained", TRAINING),
    "cifar10_scratch_32px_30m_seed0": ("trained", TRAINING),
    "cifar10_scratch_32px_30m_seed1": ("trained", TRAINING),
    "crossing": ("crossing", TRAINING),
    "engines": ("engines", ("engines", "models")),
    "engines_without_merging": ("engines", ("engines", "models")),
    "evaluate_pipeline": ("evaluate_pipeline", ("evaluation", "engines", *INFERENCE)),
    "explanations": ("explanations", ("inspection", *INFERENCE)),
    "inference_fp32": ("inference_fp32", ("models",)),
    "inference_fp32_before_refactoring": ("inference_fp32", ("models",)),
    "inspection_cost": ("inspection_cost", ("inspection", "models")),
    "int8": ("int8", ("engines", *INFERENCE)),
    "kill_soak": ("kill_soak", ("training", "data", "core")),
    "pets_finetune_10m": ("trained", (*TRAINING, "checkpoints")),
    "pets_finetune_10m_seed1": ("trained", (*TRAINING, "checkpoints")),
    "pets_finetune_5m": ("trained", (*TRAINING, "checkpoints")),
    "probes": ("probes", ("evaluation", *INFERENCE)),
    "quickstart": ("trained", TRAINING),
    "scale": ("scale", ("training", "data", "inference", "cluster")),
    "serve_faults": ("serve_faults", ("serve", "inference")),
    "serve_load": ("serve_load", ("serve", "engines", *INFERENCE)),
    "shipped_cifar10": ("ship", ("checkpoints", "metrics", *INFERENCE)),
    "six_convolutions_100m": ("trained", TRAINING),
    "six_convolutions_30m_seed0": ("trained", TRAINING),
    "six_convolutions_30m_seed1": ("trained", TRAINING),
    "study_bert": ("studied", BERT),
    "study_data_size": ("studied", ("studies", *TRAINING)),
    "study_equivariance": ("studied", EQUIVARIANCE),
    "study_gan": ("studied", ("lineage", "studies/gan_study.py", *TRAINING, *INFERENCE)),
    "study_head": ("studied", ("studies", *TRAINING)),
    "study_inductive_bias": ("studied", ("studies", *TRAINING)),
    "study_lineage": ("studied", (*TEXT, *BERT, *EQUIVARIANCE, "studies/lineage_steps.py", *TRAINING)),
    "study_non_local": ("studied", RESNETS),
    "study_order": ("studied", TEXT),
    "study_positions": ("studied", ("studies", *TRAINING)),
    "study_sasa": ("studied", RESNETS),
    "study_seq2seq": ("studied", TEXT),
    "study_spelling": ("studied", TEXT),
    "study_spelling_20m": ("studied", TEXT),
    "study_warmup": ("studied", TEXT),
    "training_speed": ("training_speed", ("training", "models", "data")),
    "training_speed_before_refactoring": ("training_speed", ("training", "models", "data")),
}


def git(*arguments: str) -> str:
    """Run git in the repository; an error gives an empty string."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def has_history() -> bool:
    """Tell whether the whole history of the repository is here."""
    return git("rev-parse", "--is-shallow-repository").strip() == "false" and (ROOT / ".git").exists()


def in_history(commit: str) -> bool:
    """Tell whether a commit is HEAD or an ancestor of it."""
    command = ["git", "merge-base", "--is-ancestor", commit.removesuffix("-dirty"), "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


def load_results() -> dict[str, dict[str, Any]]:
    """Read every results/*.json."""
    return {
        file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted((ROOT / "results").glob("*.json"))
    }


def commits(result: dict[str, Any]) -> list[str]:
    """List the commit of a result, and those of parts that were measured again."""
    return [result["commit"], *(part["commit"] for part in result.get("remeasured", {}).values())]


def is_text(statement: ast.stmt) -> bool:
    """Tell whether a statement is a string: the docstring of a module, class, function or attribute."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def meaning(source: str) -> str:
    """Give a Python file's syntax tree without docstrings, or the text itself if it cannot be parsed."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [statement for statement in body if not is_text(statement)]  # type: ignore[attr-defined]
    return ast.dump(tree)


@cache
def changed_files(commit: str) -> frozenset[str]:
    """List the Python files of src/ and benchmarks/ whose meaning a commit changed, by their new and old names."""
    changed = set()
    listing = git("diff-tree", "-r", "-M", "--no-commit-id", "--name-status", commit, "--", "src", "benchmarks")
    for line in listing.splitlines():
        status, *names = line.split("\t")
        if not names[-1].endswith(".py") or status == "R100":
            continue
        if status[0] in "MR":
            before, after = git("show", f"{commit}^:{names[0]}"), git("show", f"{commit}:{names[-1]}")
            if meaning(before) == meaning(after):
                continue
        changed.update(names)
    return frozenset(changed)


def measured_paths(name: str) -> tuple[str, ...]:
    """List the paths a result measures: its benchmark, and packages or files of src/patchword."""
    script, packages = SOURCES[name]
    return (
        f"benchmarks/{script}.py",
        *(f"src/patchword/{each}" if each.endswith(".py") else f"src/patchword/{each}/" for each in packages),
    )


def ages(name: str, commit: str) -> tuple[int, int]:
    """Count the commits since a result's, and those that changed what it measures."""
    since = git("rev-list", f"{commit.removesuffix('-dirty')}..HEAD").split()
    paths = measured_paths(name)
    return len(since), sum(any(file.startswith(paths) for file in changed_files(one)) for one in since)


def problems(results: dict[str, dict[str, Any]]) -> list[str]:
    """List missing entries, entries without a result, and commits that are not in the history."""
    found = [f"results/{name}.json has no entry in benchmarks/stale.py" for name in sorted(results.keys() - SOURCES)]
    found += [
        f"benchmarks/stale.py names {name}, which is not in results/" for name in sorted(SOURCES.keys() - results)
    ]
    if has_history():
        found += [
            f"results/{name}.json: commit {commit[:12]} is not in the history"
            for name, result in results.items()
            for commit in commits(result)
            if not in_history(commit)
        ]
    return found


def main() -> int:
    """List the age of all results, or check them."""
    parser = argparse.ArgumentParser(description="List results that are older than the code they measure.")
    parser.add_argument("--check", action="store_true", help="fail on missing entries and commits; staleness passes")
    results = load_results()
    if parser.parse_args().check:
        found = problems(results)
        print("\n".join(found) or "every result has an entry and a commit in the history")
        return 1 if found else 0
    print(f"{'result':36}{'commit':14}{'age':>5}{'touched':>9}  {'CPU':8}notes")
    for name, result in results.items():
        commit = result["commit"]
        known = name in SOURCES and in_history(commit)
        age, touched = ages(name, commit) if known else (0, 0)
        notes = ["stale"] if touched else []
        notes += ["dirty"] if commit.endswith("-dirty") else []
        notes += [] if name in SOURCES else ["no entry"]
        notes += [] if in_history(commit) else ["commit not in history"]
        notes += ["measured at a commit not in the repository"] if "commit_not_in_repository" in result else []
        notes += [
            f"{part} measured again at {run['commit'][:12]}" for part, run in result.get("remeasured", {}).items()
        ]
        counts = f"{age:5}{touched:9}" if known else f"{'?':>5}{'?':>9}"
        print(f"{name:36}{commit[:12]:14}{counts}  {result['machine']['capability']:8}{', '.join(notes)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
