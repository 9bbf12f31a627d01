"""The study of BERT: what pre-training on text without labels gives when labels are few."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.nn import functional as F

from ..config import JsonConfig
from ..errors import TrainingError
from ..lineage.bert import BertConfig, MaskedLanguageModel
from ..lineage.bert_fit import FitConfig, accuracy, finetune, pretrain
from ..lineage.sentences import INDEX, MAX_LENGTH, TOPICS, VOCAB_SIZE, draw_sentences
from ..plots.panel import Panel
from .study import Cell, Length, Means, ResultRow, Study
from .study_report import make_study_panel, show_accuracy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PRETRAINING_FRACTION = 0.8  # of the steps of a run
UNLABELED, LABELED, TEST = 20_000, 2_000, 2_000  # sentences
TEST_SEED = 10**6  # no seed of a run
WARMUP_STEPS, TIMED_STEPS = 2, 20
SETUP_SECONDS = 2.0  # of a run: drawing sentences, and the test
NEIGHBORS = 3  # nearest words that are counted


@dataclass(frozen=True)
class BertRun(JsonConfig):
    """The training of a BERT that tells the topic of a sentence, as a cell of a study."""

    section = "bert_run"

    pretrained: bool = True
    """Whether most steps are masked language modeling; the rest are fine-tuning. Otherwise all steps use labels."""
    labels_per_topic: int = 1
    """Number of labeled sentences of each topic."""
    pretraining_lr: float = 2e-3
    finetuning_lr: float = 1e-3

    @property
    def model(self) -> BertConfig:
        """The BERT, small as the text is."""
        return BertConfig(
            vocab_size=VOCAB_SIZE,
            max_length=MAX_LENGTH,
            embed_dim=64,
            depth=2,
            num_heads=4,
            mlp_dim=128,
            init_std=0.12,
            dropout=0.0,
            attention_dropout=0.0,
        )

    def time_step(self, now: Callable[[], float]) -> tuple[float, float]:
        """Measure the steps of the kind that the run has most of."""
        sentences = draw_sentences(100, seed=0)
        start = 0.0
        for steps in (WARMUP_STEPS, TIMED_STEPS):
            fit, start = FitConfig(steps, 0, 1e-3), now()
            if self.pretrained:
                pretrain(sentences.tokens, self.model, fit)
            else:
                finetune(sentences.tokens, sentences.topics, len(TOPICS), self.model, fit)
        return (now() - start) / TIMED_STEPS, SETUP_SECONDS

    def run(self, seed: int, length: Length, now: Callable[[], float]) -> dict[str, Any]:
        """Train and test the model."""
        assert length.steps is not None
        started, steps = now(), round(PRETRAINING_FRACTION * length.steps) if self.pretrained else 0
        labeled = draw_sentences(LABELED, 3 * seed).per_topic(self.labels_per_topic)
        pretrained, details = None, {}
        if self.pretrained:
            unlabeled = draw_sentences(UNLABELED, 3 * seed + 1)
            pretrained, metrics = pretrain(unlabeled.tokens, self.model, FitConfig(steps, seed, self.pretraining_lr))
            similarity = word_similarity(pretrained)
            details = {"masked_accuracy": metrics["accuracy"], "same_topic": count_same_topic(similarity)}
            if seed == 0 and self.labels_per_topic == 1:  # the same in all cells: drawn once
                details["similarity"] = similarity.round(2).tolist()
        fit = FitConfig(length.steps - steps, seed, self.finetuning_lr)
        model, metrics = finetune(labeled.tokens, labeled.topics, len(TOPICS), self.model, fit, pretrained)
        if not np.isfinite(metrics["loss"]):
            raise TrainingError(f"The loss is {metrics['loss']}.", code="not_finite")
        test = draw_sentences(TEST, TEST_SEED)
        return {
            "accuracy": accuracy(model, test.tokens, test.topics),
            "n": TEST,
            "steps": length.steps,
            "seconds": now() - started,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "details": {**details, "loss": metrics["loss"]},
        }


def topic_words() -> list[tuple[str, str]]:
    """Return the topic and the word of all content words, topic by topic."""
    return [(topic, word) for topic, words in TOPICS.items() for word in words.split()]


def word_similarity(model: MaskedLanguageModel) -> np.ndarray:
    """Return the cosine similarity of the embeddings of all content words (words, words)."""
    table = model.bert.token_embed.weight.detach()[[INDEX[word] for _, word in topic_words()]]
    table = F.normalize(table - table.mean(dim=0), dim=1)
    return (table @ table.T).numpy()


def count_same_topic(similarity: np.ndarray) -> float:
    """Return the fraction of the nearest words that have the topic of their word."""
    topics = np.array([topic for topic, _ in topic_words()])
    others = np.where(np.eye(len(topics), dtype=bool), -np.inf, similarity)
    nearest = np.argsort(-others, axis=1)[:, :NEIGHBORS]
    return float((topics[nearest] == topics[:, None]).mean())


def bert() -> Study:
    """Compare a pre-trained BERT with one from scratch, by the number of labels."""
    cells = [
        Cell(series, labels, BertRun(pretrained=pretrained, labels_per_topic=labels))
        for series, pretrained in (("pre-trained", True), ("from scratch", False))
        for labels in (1, 2, 5, 20)
    ]
    return Study(
        "bert", "What does text without labels give?",
        "Sentences about six topics: which topic is it? A small BERT fills in masked words of 20,000 sentences without "
        "labels and is then fine-tuned, or learns from the labeled sentences alone, with as many steps in all.",
        "Pre-training and fine-tuning gave the best results on eleven tasks; the smallest datasets gained most "
        "(Devlin et al., 2019).",
        "labeled sentences per topic", tuple(cells), "steps", logarithmic=True, min_steps=800,
        measured="test sentences whose topic is right", summarize=summarize_bert, panels=bert_panels,
        limits="The sentences are made up: 11 words, 5 of which are about the topic, in random order. Real text has "
        "grammar and meaning, and needs far more of everything.",
    )  # fmt: skip


def summarize_bert(means: Means) -> str:
    """The caption of the figure of the accuracy."""
    few, many = ([show_accuracy(means, series, n) for series in ("pre-trained", "from scratch")] for n in (1, 20))
    return (
        f"With one labeled sentence per topic, the pre-trained model gets {few[0]} of the test sentences right, "
        f"the one from scratch {few[1]}; with 20, {many[0]} and {many[1]}."
    )


def bert_panels(study: Study, rows: Sequence[ResultRow]) -> list[Panel]:
    """Accuracy by the number of labels, and what the embeddings of words have learned from text alone."""
    panels = [make_study_panel(study, rows)]
    details = [row["details"] for row in rows if "details" in row]
    maps = [each["similarity"] for each in details if "similarity" in each]
    if maps:
        same = np.mean([each["same_topic"] for each in details if "same_topic" in each])
        caption = (
            f"Similarity of word embeddings after pre-training, before any label. Of the {NEIGHBORS} nearest words of "
            f"each word, {same:.0%} belong to its topic; by chance it would be {1 / len(TOPICS):.0%}."
        )
        similarity = np.array(maps[0])
        draw = partial(similarity_figure, similarity)
        panels.append(Panel("bert_words", "Words of one topic become alike", caption, "", draw, {"cosine": similarity}))
    return panels


def similarity_figure(similarity: np.ndarray) -> "Figure":
    """The similarity of all pairs of words, with the words of a topic side by side."""
    from ..plots.theme import COLORMAP, new_figure

    figure = new_figure(6.4, 5.4)
    axes = figure.subplots()
    size = len(similarity) // len(TOPICS)
    image = axes.imshow(similarity, cmap=COLORMAP, vmin=-0.5, vmax=1)
    middles = [size * i + (size - 1) / 2 for i in range(len(TOPICS))]
    axes.set_xticks(middles, TOPICS)
    axes.set_yticks(middles, TOPICS)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.colorbar(image, label="cosine similarity", shrink=0.8).outline.set_visible(False)
    return figure
