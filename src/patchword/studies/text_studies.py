"""The studies of text models that lead to ViT: fixed context or attention, order, warm-up, and spelling to sounds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..lineage.fit import TextConfig, TextTrainer, fit, initial_gradients
from ..lineage.greedy_decoding import align, evaluate_greedy
from ..lineage.tasks import make_task
from .study import Cell, Length, Means, Study
from .study_report import show_accuracy
from .text_panels import seq2seq_panels, spelling_panels, warmup_panels

WARMUP_STEPS, TIMED_STEPS = 2, 6
SETUP_SECONDS = 0.5  # of a run, before its first step
# Inputs whose alignments are drawn.
SHOWN_SOURCES: dict[str, tuple[tuple[str, ...], ...]] = {
    "reverse": (tuple("transformer"),),
    "numerals": (("three", "hundred", "forty", "two", "thousand", "five", "hundred", "sixty", "seven"),),
    "dates": (("Thursday", "October", *"22", *"2020"),),  # the day on which the ViT paper appeared
    "spelling": (tuple("attention"), tuple("patchword"), tuple("knowledge")),
}


@dataclass(frozen=True)
class TextRun:
    """The training of a text model, as a cell of a study."""

    config: TextConfig

    def to_json(self) -> dict[str, Any]:
        """The config, under a name of its own."""
        return {"text": self.config.to_json()}

    def time_step(self, now: Callable[[], float]) -> tuple[float, float]:
        """Measure a training step, and the test of a model that never writes <eos>, which is the longest."""
        trainer = TextTrainer(self.config, seed=0)
        for _ in range(WARMUP_STEPS):
            trainer.step(0.5)
        start = now()
        for _ in range(TIMED_STEPS):
            trainer.step(0.5)
        step_seconds, start = (now() - start) / TIMED_STEPS, now()
        evaluate_greedy(trainer.model.eval(), trainer.task)
        return step_seconds, SETUP_SECONDS + now() - start

    def run(self, seed: int, length: Length, now: Callable[[], float]) -> dict[str, Any]:
        """Train and test the model."""
        config = self.config
        gradients = initial_gradients(config, seed) if config.model == "transformer" else []
        result = fit(config, seed, length.steps, length.seconds, now)
        details: dict[str, Any] = {"by_length": {str(n): rate for n, rate in result.by_length.items()}}
        details["loss"], details["initial_gradients"] = result.loss, gradients
        task = make_task(config.task, config.min_length, config.max_length)
        if seed == 0 and (config.attention or config.model == "transformer"):
            maps = [align(result.model, task, source) for source in SHOWN_SOURCES.get(config.task, ())]
            details["alignments"] = [{"source": m.source, "output": m.output, "weights": m.weights} for m in maps]
        return {
            "accuracy": result.accuracy,
            "n": len(task.test),
            "steps": result.steps,
            "seconds": result.seconds,
            "parameters": sum(parameter.numel() for parameter in result.model.parameters()),
            "details": details,
        }


TRANSFORMER = TextConfig(model="transformer", dim=64)  # about as many parameters as the LSTM of width 128
CELLS = ("rnn", "gru", "lstm")


def seq2seq() -> Study:
    """Compare a fixed context vector with attention, by the length of the input (Sutskever; Cho; Luong)."""
    cells = [
        Cell(series, model.upper(), TextRun(TextConfig(model=model, attention=attention)))  # type: ignore[arg-type]
        for series, attention in (("fixed context", False), ("attention", True))
        for model in CELLS
    ]
    cells.append(Cell("attention", "Transformer", TextRun(TRANSFORMER)))
    cells += [
        Cell("numerals", "LSTM", TextRun(TextConfig(task="numerals"))),
        Cell("dates", "LSTM", TextRun(TextConfig(task="dates"))),
        Cell("dates", "Transformer", TextRun(TRANSFORMER.replace(task="dates"))),
    ]
    return Study(
        "seq2seq", "Can one vector hold a whole sentence?",
        "Strings of 4 to 24 letters are reversed by an encoder and a decoder: through one fixed context vector, or "
        "with attention to all encoder states. How long may the input be?",
        "Cho et al. (2014) saw translations get worse with the length of the sentence; Sutskever et al. (2014), with a "
        "larger LSTM and the source reversed, did not. Attention removes the bottleneck (Bahdanau et al., 2015).",
        "network", tuple(cells), "steps", min_steps=400, measured="test sequences that are written without a mistake",
        panels=seq2seq_panels,
        limits="Reversing letters needs exact memory of every letter, which is harder for a fixed vector than "
        "translation is. The width (128) and the training are small: a larger vector holds longer strings, but has a "
        "limit, too.",
    )  # fmt: skip


def order() -> Study:
    """Compare Transformers with and without positions, on a task that needs order and one that does not."""
    short = TRANSFORMER.replace(min_length=8, max_length=8)
    cells = [
        Cell(series, task, TextRun(short.replace(task=task, positions=positions)))
        for series, positions in (("with positions", True), ("without positions", False))
        for task in ("reverse", "sort")
    ]
    return Study(
        "order", "How does a Transformer know the order of words?",
        "Strings of 8 letters are reversed, which needs their order, or sorted, which does not; with and without "
        "position encodings.",
        "Attention ignores the order of its input, so the model must be given positions (Vaswani et al., 2017, "
        "section 3.5).",
        "task", tuple(cells), "steps", min_steps=160, measured="test strings that are written without a mistake",
        summarize=summarize_order,
        limits="Only the encoder is blind to order: the decoder still sees how many letters it has written, because it "
        "attends to them alone.",
    )  # fmt: skip


def summarize_order(means: Means) -> str:
    """The caption of the figure of `order`."""
    accuracies = [
        show_accuracy(means, f"{kind} positions", task) for task in ("reverse", "sort") for kind in ("with", "without")
    ]
    return (
        "Strings without a mistake: reversed {} with positions and {} without, because reversing needs the order of "
        "the letters; sorted {} and {}, because sorting does not."
    ).format(*accuracies)


def warmup() -> Study:
    """Compare post-norm and pre-norm, with and without warm-up, at two learning rates (Xiong et al., 2020)."""
    deep = TRANSFORMER.replace(depth=6, min_length=4, max_length=8, clip_grad_norm=None, batch_size=64)
    cells = [
        Cell(f"{name}, {'warm-up' if fraction else 'no warm-up'}", lr,
             TextRun(deep.replace(pre_norm=pre_norm, lr=lr, warmup_fraction=fraction)))
        for name, pre_norm in (("post-norm", False), ("pre-norm", True))
        for fraction in (0.2, 0.0)
        for lr in (1e-3, 4e-3)
    ]  # fmt: skip
    return Study(
        "warmup", "Why does ViT put its norms first?",
        "A Transformer of 6 + 6 layers reverses strings of 4 to 8 letters: norms after the sums, as in 2017, or before "
        "the branches, as in ViT; with and without warm-up, without clipping of gradients.",
        "Post-norm has large gradients near the output at the start, and needs warm-up; pre-norm does not (Xiong et "
        "al., 2020).",
        "learning rate", tuple(cells), "steps", min_steps=250,
        measured="test strings that are written without a mistake",
        panels=warmup_panels,
        limits="Models and trainings are small, and warm-up takes the first fifth of the steps. In a short training, "
        "such as that of the lineage in 15 minutes, post-norm fails with warm-up, too: the figure then shows what "
        "pre-norm gains, not what warm-up does. With twice the steps (--budget 16m --seeds 3), post-norm learns with "
        "warm-up, if not always.",
    )  # fmt: skip


def spelling() -> Study:
    """Compare fixed context and attention on a real task, in equal time: English words to sounds."""
    cells = [
        Cell("spelling", "fixed context", TextRun(TextConfig(task="spelling", attention=False))),
        Cell("spelling", "attention", TextRun(TextConfig(task="spelling"))),
        Cell("spelling", "Transformer", TextRun(TRANSFORMER.replace(task="spelling"))),
    ]
    return Study(
        "spelling", "From spelling to sounds",
        "English words of the CMU Pronouncing Dictionary, letter by letter, are turned into their sounds: by an LSTM "
        "with a fixed context vector, by one with attention, and by a Transformer, in equal time.",
        "Words are short, so a fixed vector is not hopeless. Attention models came close to the best systems of "
        "their time (Toshniwal and Livescu, 2016).",
        "model", tuple(cells), "time", measured="test words whose sounds are all right", panels=spelling_panels,
        summarize=summarize_spelling,
        limits="The dictionary contains names and words with several pronunciations, of which one counts. Stress is "
        "ignored.",
    )  # fmt: skip


def summarize_spelling(means: Means) -> str:
    """The caption of the figure of `spelling`."""
    fixed, attention, transformer = (
        show_accuracy(means, "spelling", name) for name in ("fixed context", "attention", "Transformer")
    )
    return (
        f"Words whose sounds are all right: LSTM with a fixed context vector {fixed}, LSTM with attention {attention}, "
        f"Transformer {transformer}."
    )


TEXT_STUDIES: dict[str, Callable[[], Study]] = {
    "seq2seq": seq2seq,
    "order": order,
    "warmup": warmup,
    "spelling": spelling,
}
