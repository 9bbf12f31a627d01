"""Experiment loggers: TensorBoard, MLflow, Weights & Biases. metrics.jsonl is always written besides."""

import importlib
import secrets
import sys
from collections.abc import Callable
from typing import Any

from ..config import Config
from ..errors import ConfigError, how_to_install
from .callbacks import Callback, LogRow, RunInfo, TrainResult


class LoggerCallback(Callback):
    """Sends every number of every row as KIND/NAME. Subclasses implement `start`, `send` and `finish`.

    A logger that fails during the run is reported once and then ignored: the run is worth more.
    """

    has_failed = False

    def start(self, info: RunInfo) -> None:
        """Open the log."""
        raise NotImplementedError

    def send(self, values: dict[str, float], step: int) -> None:
        """Log the values of a step."""
        raise NotImplementedError

    def finish(self, result: TrainResult | None) -> None:
        """Close the log."""
        raise NotImplementedError

    def on_train_start(self, info: RunInfo) -> None:
        """Open the log; an error ends the run before its first step."""
        try:
            self.start(info)
        except Exception as error:
            raise ConfigError(f"loggers: {type(self).__name__} could not be started ({error}).") from None

    def on_log(self, row: LogRow) -> None:
        """Log the numbers of a row."""
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and k not in ("step", "n")}
        if not self.has_failed:
            self.attempt(self.send, {f"{row['kind']}/{name}": value for name, value in numbers.items()}, row["step"])

    def on_train_end(self, result: TrainResult | None) -> None:
        """Close the log."""
        self.attempt(self.finish, result)

    def attempt(self, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action`; an error is printed and disables the logger."""
        try:
            action(*arguments)
        except Exception as error:
            self.has_failed = True
            print(f"{type(self).__name__} failed and is disabled: {error}", file=sys.stderr)


class TensorBoard(LoggerCallback):
    """Logs to RUN/tensorboard; view it with `tensorboard --logdir RUN`."""

    def start(self, info: RunInfo) -> None:
        """Open the log; rows after the resumed checkpoint are dropped."""
        module = import_logger("torch.utils.tensorboard", "tensorboard")
        self.writer = module.SummaryWriter(info.run_dir / "tensorboard", purge_step=info.resumed_step or None)

    def send(self, values: dict[str, float], step: int) -> None:
        """Log the values of a step."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def finish(self, result: TrainResult | None) -> None:
        """Close the log."""
        self.writer.close()


class MLflow(LoggerCallback):
    """Logs to the tracking server of MLFLOW_TRACKING_URI, or to the directory mlruns."""

    def start(self, info: RunInfo) -> None:
        """Open the log, and store the configuration."""
        self.mlflow = import_logger("mlflow", "mlflow")
        self.mlflow.start_run(run_name=info.run_dir.name)
        self.mlflow.log_dict(info.config.to_json(), "config.json")

    def send(self, values: dict[str, float], step: int) -> None:
        """Log the values of a step."""
        self.mlflow.log_metrics(values, step=step)

    def finish(self, result: TrainResult | None) -> None:
        """Close the log."""
        self.mlflow.end_run("FINISHED" if result else "KILLED")


class WandB(LoggerCallback):
    """Logs to Weights & Biases, configured by its environment variables (WANDB_MODE=offline keeps everything local)."""

    def start(self, info: RunInfo) -> None:
        """Open the log, or that of the run that is resumed."""
        wandb = import_logger("wandb", "wandb")
        id_file = info.run_dir / "wandb.id"  # names of directories are not unique
        if not id_file.is_file():
            id_file.write_text(secrets.token_hex(8))
        self.run = wandb.init(
            project="patchword",
            name=info.run_dir.name,
            id=id_file.read_text(),
            resume="allow",
            dir=str(info.run_dir),
            config=info.config.to_json(),
        )

    def send(self, values: dict[str, float], step: int) -> None:
        """Log the values of a step."""
        self.run.log(values, step=step)

    def finish(self, result: TrainResult | None) -> None:
        """Close the log."""
        self.run.finish(exit_code=0 if result else 1)


LOGGERS: dict[str, Callable[[], LoggerCallback]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def import_logger(module: str, package: str) -> Any:
    """Import a module, or say how to install its package."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"loggers: {package} is not installed. Run pip install {package}, or {how_to_install('log')}."
        ) from None


def make_loggers(config: Config) -> tuple[Callback, ...]:
    """Make the callbacks that `loggers` asks for; a missing package is an error."""
    for name in config.loggers:
        import_logger({"tensorboard": "torch.utils.tensorboard"}.get(name, name), name)
    return tuple(LOGGERS[name]() for name in config.loggers)
