"""The lineage of ViT in one report: each step with the study that shows what it adds, in a share of one budget."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import AugmentConfig, Config, DataConfig, OptimConfig, ResNetConfig, ScheduleConfig, ViTConfig
from ..core.io import read_json, replace_json
from ..errors import ConfigError
from ..report.figure_files import write_page
from ..report.pages import Chapter, story_html
from .definitions import make_study
from .runner import RESULTS_FILE, BudgetTooShortError, format_seconds, make_plan, run_study
from .study import Cell, ResultRow, Study
from .study_report import describe_study, make_panels

NAME = "lineage"


@dataclass(frozen=True)
class Step:
    """A step of the lineage.

    Attributes:
        title: The title of its chapter.
        text: What the step before could not do, and what this one adds.
        study: The name of the study that measures it.
        fraction: The fraction of the budget that the study gets.
    """

    title: str
    text: str
    study: str
    fraction: float


STEPS = (
    Step(
        "1. Sequence to sequence, and attention",
        "A recurrent network reads a sentence token by token, and a second one writes another sentence from its last "
        "state (2014). That state has a fixed size, however long the sentence is. Attention keeps all states: at each "
        "step the decoder compares its own state with them, and takes the mean of those that fit.",
        "seq2seq", 0.42,
    ),
    Step(
        "2. The Transformer: attention alone",
        "Recurrence reads tokens one after the other. The Transformer (2017) drops it: all tokens attend to all others "
        "at once. But attention ignores order, so positions have to be added to the tokens.",
        "order", 0.08,
    ),
    Step(
        "3. Norms first",
        "The Transformer of 2017 normalizes after each residual sum, and needs a warm-up of the learning rate. BERT "
        "kept that order; ViT normalizes before each branch.",
        "warmup", 0.2,
    ),
    Step(
        "4. BERT: [CLS], pre-training and fine-tuning",
        "BERT (2018) is the encoder alone. It learns from text without labels by filling in masked words, then from "
        "few labels: a [CLS] token in front of the sentence gathers what the classifier needs. ViT's class token is "
        "this token.",
        "bert", 0.12,
    ),
    Step(
        "5. What a CNN knows before it has seen an image",
        "Convolutions are local and treat every place alike. Attention sees the whole image in its first layer, and "
        "knows nothing of places but what positions teach it.",
        "equivariance", 0.02,
    ),
    Step(
        "6. ViT: patches as words",
        "An image is cut into patches, the words of a BERT with its norms first. The same handwritten digits are "
        "learned by ViT with and without positions, and by a ResNet.",
        "vit", 0.16,
    ),
)  # fmt: skip


def vit_on_digits() -> Study:
    """ViT with and without positions, and a ResNet, on scikit-learn's handwritten digits."""
    base = Config(
        data=DataConfig(source="digits"),
        model=ViTConfig(
            image_size=(8, 8), patch_size=(2, 2), in_channels=1, embed_dim=64, depth=4, num_heads=4, mlp_dim=128,
        ),
        augment=AugmentConfig(crop="shift", shift_limit=0.125),
        optim=OptimConfig(lr=2e-3, weight_decay=0.05),
        schedule=ScheduleConfig(shape="cosine", warmup_fraction=0.1),
        batch_size=64, eval_every=1e9, loggers=(),
    )  # fmt: skip
    resnet = ResNetConfig(image_size=(8, 8), in_channels=1, layers=(1, 1, 1), kind="cifar")
    models = {"ViT": base.model, "ViT without positions": base.model.replace(pos_embed="none"), "ResNet": resnet}
    cells = tuple(Cell("digits", name, base.replace(model=model)) for name, model in models.items())
    return Study(
        "vit", "Does a ViT need positions?",
        "ViT with and without position embeddings, and a small ResNet, on handwritten digits of 8 x 8 pixels.",
        "Without position embeddings ViT loses 2.6 points on ImageNet (Table 8). On little data ResNets lead "
        "(Figure 3).",
        "model", cells, "steps", min_steps=300,
    )  # fmt: skip


def run_lineage(
    out: Path, budget: float, seeds: int = 1, machine: str = "", say: Callable[[str], object] = lambda text: None
) -> dict[str, list[ResultRow]]:
    """Run the study of each step in a directory of its own, and write one report, which grows with each chapter.

    It is resumed like its studies.

    Returns:
        The rows of each study, by its name.
    """
    require_lineage_dir(out, budget, seeds)
    studies = {step.study: vit_on_digits() if step.study == "vit" else make_study(step.study) for step in STEPS}
    plan_chapters(studies, out, budget, seeds, say)
    rows: dict[str, list[ResultRow]] = {}
    chapters, panels = [], []
    for step in STEPS:
        say(step.title)
        study = studies[step.study]
        rows[step.study] = run_study(study, out / step.study, step.fraction * budget, seeds, say)
        figures = make_panels(study, rows[step.study])
        facts = [fact for fact in describe_study(study, rows[step.study], machine) if fact[0] != "Machine"]
        chapters.append(Chapter(step.title, step.text, facts, figures, study.limits))
        panels += figures
        replace_json(out / RESULTS_FILE, {**header(budget, seeds), "chapters": rows})
        page = story_html("From seq2seq to ViT: what each step added", [("Machine", machine)], chapters)
        write_page(out, page, panels, [panel.name for panel in panels])
    return rows


def header(budget: float, seeds: int) -> dict[str, Any]:
    """What results.json says besides the rows."""
    return {"study": NAME, "budget": budget, "seeds": seeds}


def require_lineage_dir(out: Path, budget: float, seeds: int) -> None:
    """Raise ConfigError if the directory holds anything but this story, with the same settings."""
    if (out / RESULTS_FILE).exists() and (saved := read_json(out / RESULTS_FILE)).get("study") == NAME:
        if (saved["budget"], saved["seeds"]) != (budget, seeds):
            raise ConfigError(
                f"{out} was started with --budget {format_seconds(saved['budget'])} --seeds {saved['seeds']}. Use "
                "these, or choose another --out.",
                code="study_differs",
            )
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{out} exists and is not the report of the lineage. Choose another --out.", code="not_a_study"
        )


def plan_chapters(
    studies: dict[str, Study], out: Path, budget: float, seeds: int, say: Callable[[str], object]
) -> None:
    """Plan all chapters before the first run, so that a budget that is too short for one of them costs no time.

    Raises:
        BudgetTooShortError: It says how long the whole story must be.
    """
    is_new = not (out / RESULTS_FILE).exists()
    out.mkdir(parents=True, exist_ok=True)
    needed: dict[str, float] = {}
    for step in STEPS:
        try:
            make_plan(studies[step.study], out / step.study, step.fraction * budget, seeds, say, time.monotonic)
        except BudgetTooShortError as error:
            needed[step.title] = error.needed / step.fraction
    if needed:
        if is_new:
            shutil.rmtree(out)
        title = max(needed, key=lambda each: needed[each])
        raise BudgetTooShortError.explain(f"{format_seconds(budget)} are too short for {title!r}", 1.1 * needed[title])
    if is_new:
        replace_json(out / RESULTS_FILE, {**header(budget, seeds), "chapters": {}})
