"""The steps of the story from seq2seq to ViT: what each adds, the study that measures it, and in which two figures."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import AugmentConfig, Config, DataConfig, OptimConfig, ResNetConfig, ScheduleConfig, ViTConfig
from ..report.pages import Contrast
from .study import Cell, Means, ResultRow, Study
from .study_report import show_accuracy
from .text_panels import mean_at_longest


@dataclass(frozen=True)
class Comparison:
    """Two cells of a study that differ in what a step adds.

    Attributes:
        subject: What is measured.
        before: How the table calls the cell without it, and the name of the cell.
        after: The same for the cell with it.
        at_longest: Whether the accuracy is that at the longest input.
    """

    subject: str
    before: tuple[str, str]
    after: tuple[str, str]
    at_longest: bool = False

    def measure(self, rows: Sequence[ResultRow]) -> Contrast:
        """Return the means over seeds of both cells, as text."""
        before, after = ((name, self.show_cell(cell, rows)) for name, cell in (self.before, self.after))
        return Contrast(self.subject, before, after)

    def show_cell(self, cell: str, rows: Sequence[ResultRow]) -> str:
        """Format the mean over seeds of a cell: a measurement, or an accuracy; "diverged" if no run finished."""
        runs = [row for row in rows if row["cell"] == cell]
        if all("value" in row for row in runs):
            return f"{statistics.mean(row['value'] for row in runs):.3g}"
        accuracies = [row["accuracy"] for row in runs if row["accuracy"] is not None]
        if not accuracies:
            return "diverged"
        mean = mean_at_longest(cell, rows) if self.at_longest else statistics.mean(accuracies)
        return f"{mean:.1%}"


@dataclass(frozen=True)
class Step:
    """A step of the lineage.

    Attributes:
        title: The title of its chapter.
        text: What the step before could not do, and what this one adds.
        study: The name of the study that measures it.
        fraction: The fraction of the budget that the study gets.
        contrast: The two cells of the study that show what the step adds.
    """

    title: str
    text: str
    study: str
    fraction: float
    contrast: Comparison


STEPS = (
    Step(
        "1. Sequence to sequence, and attention",
        "A recurrent network reads a sentence token by token, and a second one writes another sentence from its last "
        "state (2014). That state has a fixed size, however long the sentence is. Attention keeps all states: at each "
        "step the decoder compares its own state with them, and takes the mean of those that fit.",
        "seq2seq", 0.42,
        Comparison(
            "strings of 24 letters reversed without a mistake, by an LSTM",
            ("fixed context vector", "fixed_context_LSTM"), ("attention", "attention_LSTM"), at_longest=True,
        ),
    ),
    Step(
        "2. The Transformer: attention alone",
        "Recurrence reads tokens one after the other. The Transformer (2017) drops it: all tokens attend to all others "
        "at once. But attention ignores order, so positions have to be added to the tokens.",
        "order", 0.08,
        Comparison(
            "strings of 8 letters reversed without a mistake, by a Transformer",
            ("no positions", "without_positions_reverse"), ("positions", "with_positions_reverse"),
        ),
    ),
    Step(
        "3. Norms first",
        "The Transformer of 2017 normalizes after each residual sum, and was trained with a warm-up of the learning "
        "rate. BERT kept that order; ViT normalizes before each branch.",
        "warmup", 0.2,
        Comparison(
            "strings reversed without a mistake: 6 + 6 layers, learning rate 0.004, no warm-up",
            ("post-norm", "post-norm_no_warm-up_0.004"), ("pre-norm", "pre-norm_no_warm-up_0.004"),
        ),
    ),
    Step(
        "4. BERT: [CLS], pre-training and fine-tuning",
        "BERT (2018) is the encoder alone. It learns from text without labels by filling in masked words, then from "
        "few labels: a [CLS] token in front of the sentence gathers what the classifier needs. ViT's class token is "
        "this token.",
        "bert", 0.12,
        Comparison(
            "sentences whose topic is right, with one labeled sentence per topic",
            ("from scratch", "from_scratch_1"), ("pre-trained", "pre-trained_1"),
        ),
    ),
    Step(
        "5. What a CNN knows before it has seen an image",
        "Convolutions are local and treat every place alike. Attention sees the whole image in its first layer, and "
        "knows nothing of places but what positions teach it.",
        "equivariance", 0.02,
        Comparison(
            "layers until a corner of the image depends on every pixel",
            ("3x3 convolutions", "layers_to_see_all_convolutions_3x3"), ("ViT", "layers_to_see_all_ViT"),
        ),
    ),
    Step(
        "6. ViT: patches as words",
        "An image is cut into patches, the words of a BERT with its norms first. The same handwritten digits are "
        "learned by ViT with and without positions, and by a ResNet.",
        "vit", 0.16,
        Comparison(
            "handwritten digits that ViT classifies right",
            ("no positions", "digits_ViT_without_positions"), ("positions", "digits_ViT"),
        ),
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
        "model", cells, "steps", min_steps=300, summarize=summarize_digits,
    )  # fmt: skip


def summarize_digits(means: Means) -> str:
    """The caption of the figure."""
    with_positions, without, resnet = (
        show_accuracy(means, "digits", name) for name in ("ViT", "ViT without positions", "ResNet")
    )
    return (
        f"Test digits that are classified right: ViT {with_positions}, the same without position embeddings {without}, "
        f"ResNet {resnet}."
    )
