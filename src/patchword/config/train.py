"""What a training run is, as plain data: enough to repeat it. A recipe is one `Config`."""

from dataclasses import dataclass, field
from typing import Literal

from .json_config import JsonConfig
from .model import ModelConfig, Size, ViTConfig

Crop = Literal["none", "shift", "resized"]
Optimizer = Literal["adamw", "sgd", "muon"]
Shape = Literal["cosine", "rsqrt", "linear", "constant"]
Precision = Literal["auto", "fp32", "bf16"]
Logger = Literal["tensorboard", "mlflow", "wandb"]


@dataclass(frozen=True)
class DataConfig(JsonConfig):
    """Where the pictures come from."""

    source: str = ""  # a folder, CSV, parquet file, tar shards, hf-datasets:NAME, or a named set such as "cifar10"
    val: str | None = None  # None: the data's own validation part, or else one that is split off the training part
    test: str | None = None  # None: the data's own test part, if there is one
    val_fraction: float = 0.1  # of the training part, where a validation part has to be split off
    train_fraction: float = 1.0  # of the training part, behind that split, that is learnt from
    multi_label: bool = False  # several labels for a picture, each right or wrong by itself
    balanced_sampling: bool = False  # every class is shown equally often
    num_workers: int = 2  # threads that prepare batches ahead
    cache_gib: float = 4.0  # GiB of decoded pictures that are kept, half of it for those that are learnt from

    def validate(self) -> None:
        self.require(0 < self.val_fraction < 1, "data.val_fraction must be above 0 and below 1.")
        self.require(0 < self.train_fraction <= 1, "data.train_fraction must be above 0 and at most 1.")
        self.require(0 <= self.num_workers <= 256, "data.num_workers must be between 0 and 256.")
        self.require(self.cache_gib >= 0, "data.cache_gib must not be negative.")


@dataclass(frozen=True)
class AugmentConfig(JsonConfig):
    """How training pictures are varied. The defaults change nothing; `presets.augmentation` has AugReg's levels."""

    crop: Crop = (
        "none"  # shift: move by up to `shift_limit`, edges filled with zeros; resized: a random part, scaled up
    )
    shift_limit: float = 0.125  # of the side
    scale: tuple[float, float] = (0.08, 1.0)  # resized: smallest and largest part of the area
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # resized: narrowest and widest proportions
    flip: float = 0.0  # probability of a mirror image
    randaug_ops: int = 0  # RandAugment: how many for each picture
    randaug_magnitude: float = 10.0  # RandAugment: how strong, 0 to 30
    color_jitter: float = 0.0  # brightness, contrast and saturation change by up to this factor
    random_erasing: float = 0.0  # probability that a random rectangle is filled with noise
    cutout: float = 0.0  # side of a square that is blanked, as a part of the picture's side
    mixup: float = 0.0  # alpha of the Beta distribution; 0: none
    cutmix: float = 0.0  # likewise; with both, each batch pair takes one of them by chance

    def validate(self) -> None:
        for name in ("flip", "random_erasing", "cutout", "shift_limit"):
            self.require(0 <= getattr(self, name) <= 1, f"augment.{name} must be between 0 and 1.")
        self.require(0 < self.scale[0] <= self.scale[1] <= 1, "augment.scale must be two parts, 0 < low <= high <= 1.")
        self.require(0 < self.ratio[0] <= self.ratio[1], "augment.ratio must be two proportions, 0 < low <= high.")
        self.require(0 <= self.randaug_ops <= 16, "augment.randaug_ops must be between 0 and 16.")
        self.require(0 <= self.randaug_magnitude <= 30, "augment.randaug_magnitude must be between 0 and 30.")
        for name in ("color_jitter", "mixup", "cutmix"):
            self.require(0 <= getattr(self, name) <= 100, f"augment.{name} must be between 0 and 100.")
        self.require(self.color_jitter <= 1, "augment.color_jitter must be at most 1.")


@dataclass(frozen=True)
class OptimConfig(JsonConfig):
    """How weights follow gradients."""

    name: Optimizer = "adamw"  # muon: matrices of the blocks by Muon, the rest by AdamW
    lr: float = 1e-3  # at the peak
    weight_decay: float = 0.05  # of matrices; biases, norms, tokens and positions have none. Multiplied by the rate
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.9  # sgd and muon
    muon_lr: float = 0.02  # muon: rate for the matrices; `lr` is for the rest
    clip_grad_norm: float = 1.0  # largest norm of the gradient; 0: no limit
    sam_rho: float = 0.0  # radius of sharpness-aware minimisation; 0: none
    layer_decay: float = 1.0  # the rate of a layer, as a part of that of the layer above
    head_lr_scale: float = 1.0  # the rate of the head, as a multiple

    def validate(self) -> None:
        for name in ("lr", "muon_lr"):
            self.require(getattr(self, name) > 0, f"optim.{name} must be above 0.")
        for name in ("weight_decay", "clip_grad_norm", "sam_rho", "head_lr_scale"):
            self.require(getattr(self, name) >= 0, f"optim.{name} must not be negative.")
        self.require(all(0 <= b < 1 for b in (*self.betas, self.momentum)), "optim.betas, momentum: 0 to below 1.")
        self.require(0 < self.layer_decay <= 1, "optim.layer_decay must be above 0 and at most 1.")


@dataclass(frozen=True)
class ScheduleConfig(JsonConfig):
    """The learning rate over the run, whether that is laid over steps or over time."""

    shape: Shape = "cosine"
    warmup_fraction: float = 0.05  # part of the run
    cooldown_fraction: float = 0.1  # part of the run: rsqrt falls to zero at its end
    min_lr_ratio: float = 0.0  # part of the peak that is left at the end (cosine, linear)

    def validate(self) -> None:
        for name in ("warmup_fraction", "cooldown_fraction", "min_lr_ratio"):
            self.require(0 <= getattr(self, name) <= 1, f"schedule.{name} must be between 0 and 1.")
        self.require(
            self.warmup_fraction + self.cooldown_fraction <= 1,
            "schedule.warmup_fraction and schedule.cooldown_fraction are longer than the run.",
        )


@dataclass(frozen=True)
class DistillConfig(JsonConfig):
    """Learning from a teacher, as DeiT does."""

    teacher: str | None = None  # any model reference
    kind: Literal["hard", "soft"] = "hard"
    weight: float = 0.5  # of the teacher's part of the loss
    temperature: float = 3.0  # soft: both sides are divided by it

    def validate(self) -> None:
        self.require(0 <= self.weight <= 1, "distill.weight must be between 0 and 1.")
        self.require(self.temperature > 0, "distill.temperature must be above 0.")


@dataclass(frozen=True)
class ProgressiveResizeConfig(JsonConfig):
    """Progressive resizing: the first phase of a run trains on smaller images, whose steps cost less."""

    scale: float = 1.0  # image scale during the first phase; 1: none
    fraction: float = 0.5  # length of the first phase, as a fraction of the run

    def validate(self) -> None:
        self.require(0 < self.scale <= 1, "progressive_resize.scale must be above 0 and at most 1.")
        self.require(0 <= self.fraction <= 1, "progressive_resize.fraction must be between 0 and 1.")


@dataclass(frozen=True)
class Config(JsonConfig):
    """A training run."""

    name: str = "run"
    seed: int = 0
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ViTConfig)  # its num_classes comes from the data
    init: str | None = None  # a model reference to start from: its architecture replaces `model`, all but the dropouts
    image_size: Size | None = None  # another than that of `model` or `init`; positions are resampled
    progressive_resize: ProgressiveResizeConfig = field(default_factory=ProgressiveResizeConfig)
    head_init: Literal["zero", "probe"] = "zero"  # what the new head of `init` starts as; probe: a logistic regression
    freeze: tuple[str, ...] = ()  # beginnings of names of weights that stay; or "all-but-head", "first-third" of blocks
    lora_rank: int = 0  # rank of LoRA in the attention's matrices; 0: none. Everything else but the head stays frozen

    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    epochs: float = 10.0  # the length of the run, unless one of the next two is given
    steps: int | None = None
    budget: float | None = None  # seconds, from the start of the command to its end
    batch_size: int = 128  # pictures of one step, over all processes
    grad_accum_steps: int = 1  # parts that a batch is computed in, to save memory
    precision: Precision = "auto"
    num_threads: int | None = None  # cores for the model's arithmetic; None: all. Results depend on it in the last bits
    ema: float = 0.0  # decay of the running average of the weights, which is then evaluated; 0: none
    wise_ft_alpha: float = 1.0  # WiSE-FT: weight of the fine-tuned in the evaluated weights; the rest are the initial

    label_smoothing: float = 0.0
    class_weights: bool = False  # rare classes count more in the loss
    distill: DistillConfig = field(default_factory=DistillConfig)

    eval_every: float = 1.0  # epochs
    save_every: float = 300.0  # seconds between checkpoints
    keep_last: int = 2  # checkpoints that stay, besides the best
    tta_flip: bool = False  # evaluate the mean of a picture and its mirror image
    loggers: tuple[Logger, ...] = ()

    def validate(self) -> None:
        self.require(bool(self.name) and "/" not in self.name, "name must be a plain word; it names the run.")
        self.require(0 <= self.seed < 2**63, "seed must be between 0 and 2**63.")
        self.require(self.epochs > 0, "epochs must be above 0.")
        self.require(self.steps is None or self.steps > 0, "steps must be above 0.")
        self.require(self.budget is None or self.budget > 0, "budget must be above 0 seconds.")
        self.require(self.steps is None or self.budget is None, "steps and budget are both given; set one to None.")
        self.require(1 <= self.batch_size <= 2**20, "batch_size must be between 1 and 1,048,576.")
        self.require(
            self.grad_accum_steps >= 1 and self.batch_size % self.grad_accum_steps == 0,
            f"grad_accum_steps {self.grad_accum_steps} must divide batch_size {self.batch_size}.",
        )
        self.require(
            self.num_threads is None or 1 <= self.num_threads <= 1024, "num_threads must be between 1 and 1024."
        )
        self.require(0 <= self.ema < 1, "ema must be at least 0 and below 1.")
        self.require(0 < self.wise_ft_alpha <= 1, "wise_ft_alpha must be above 0 and at most 1.")
        self.require(
            self.init is not None or self.wise_ft_alpha == 1,
            "wise_ft_alpha interpolates with pretrained weights, so it needs init; set it to 1 to train from scratch.",
        )
        self.require(0 <= self.label_smoothing < 1, "label_smoothing must be at least 0 and below 1.")
        self.require(self.eval_every > 0, "eval_every must be above 0.")
        self.require(
            self.save_every >= 0 and self.keep_last >= 1, "save_every must not be negative, and keep_last at least 1."
        )
        self.require(0 <= self.lora_rank <= 1024, "lora_rank must be between 0 and 1024.")
        self.require(
            not (self.lora_rank and self.freeze), "LoRA freezes all weights but its own and the head; leave freeze out."
        )
        self.require(
            self.init is not None or "first-third" not in self.freeze,
            "freeze first-third keeps weights that were learnt, so it needs init; set freeze to () for a new model.",
        )
        distilled = isinstance(self.model, ViTConfig) and self.model.distillation
        self.require(
            not distilled or self.distill.teacher is not None or self.init is not None or not self.data.source,
            "a model with distillation needs distill.teacher.",
        )
