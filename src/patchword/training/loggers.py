"""Rows of metrics sent elsewhere, by choice: TensorBoard, MLflow, Weights & Biases. metrics.jsonl is written always."""

import importlib
import secrets
import sys
from collections.abc import Callable
from typing import Any

from ..config import Config
from ..errors import ConfigError, how_to_install
from .callbacks import Callback, RunInfo, TrainResult


class LoggerCallback(Callback):
    """Sends every number of every row as KIND/NAME at its step. Subclasses say where to.

    A logger that fails while the run goes is told of once and then left alone: the run is worth more.
    """

    broken = False

    def begin(self, briefing: RunInfo) -> None:
        try:
            self.start(briefing)
        except Exception as error:
            raise ConfigError(f"log: {type(self).__name__} could not be started ({error}).") from None

    def start(self, briefing: RunInfo) -> None:
        raise NotImplementedError

    def send(self, values: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def finish(self, outcome: TrainResult | None) -> None:
        raise NotImplementedError

    def row(self, row: dict[str, Any], progress: float, left: float) -> None:
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and k not in ("step", "n")}
        if not self.broken:
            self.attempt(self.send, {f"{row['kind']}/{name}": value for name, value in numbers.items()}, row["step"])

    def end(self, outcome: TrainResult | None) -> None:
        self.attempt(self.finish, outcome)

    def attempt(self, action: Callable[..., None], *arguments: Any) -> None:
        try:
            action(*arguments)
        except Exception as error:
            self.broken = True
            print(f"{type(self).__name__} failed and gets no more rows: {error}", file=sys.stderr)


class TensorBoard(LoggerCallback):
    """RUN/tensorboard; look at it with `tensorboard --logdir RUN`."""

    def start(self, briefing: RunInfo) -> None:
        module = needed("torch.utils.tensorboard", "tensorboard")
        self.writer = module.SummaryWriter(briefing.folder / "tensorboard", purge_step=briefing.resumed_at or None)

    def send(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def finish(self, outcome: TrainResult | None) -> None:
        self.writer.close()


class MLflow(LoggerCallback):
    """The tracking server of MLFLOW_TRACKING_URI, or else the folder mlruns."""

    def start(self, briefing: RunInfo) -> None:
        self.mlflow = needed("mlflow", "mlflow")
        self.mlflow.start_run(run_name=briefing.folder.name)
        self.mlflow.log_dict(briefing.config.to_json(), "config.json")

    def send(self, values: dict[str, float], step: int) -> None:
        self.mlflow.log_metrics(values, step=step)

    def finish(self, outcome: TrainResult | None) -> None:
        self.mlflow.end_run("FINISHED" if outcome else "KILLED")


class WandB(LoggerCallback):
    """Weights & Biases, as its own environment variables say (WANDB_MODE=offline keeps all here)."""

    def start(self, briefing: RunInfo) -> None:
        wandb = needed("wandb", "wandb")
        known = briefing.folder / "wandb.id"  # names of folders are not unique
        if not known.is_file():
            known.write_text(secrets.token_hex(8))
        self.run = wandb.init(
            project="patchword",
            name=briefing.folder.name,
            id=known.read_text(),
            resume="allow",
            dir=str(briefing.folder),
            config=briefing.config.to_json(),
        )

    def send(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def finish(self, outcome: TrainResult | None) -> None:
        self.run.finish(exit_code=0 if outcome else 1)


KINDS: dict[str, Callable[[], LoggerCallback]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def needed(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"log: {package} is not installed. pip install {package}, or {how_to_install('log')}."
        ) from None


def make_loggers(config: Config) -> tuple[Callback, ...]:
    for name in config.loggers:
        needed({"tensorboard": "torch.utils.tensorboard"}.get(name, name), name)
    return tuple(KINDS[name]() for name in config.loggers)
