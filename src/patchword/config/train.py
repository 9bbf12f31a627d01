"""Training configurations as plain data: everything needed to repeat a run. A recipe is one `Config`."""

from dataclasses import dataclass, field
from typing import Literal

from .json_config import JsonConfig
from .model import ModelConfig, Size, ViTConfig

Crop = Literal["none", "shift", "resized"]
Optimizer = Literal["adamw", "sgd", "muon"]
ScheduleShape = Literal["cosine", "rsqrt", "linear", "constant"]
Precision = Literal["auto", "fp32", "bf16"]
Logger = Literal["tensorboard", "mlflow", "wandb"]
Parallel = Literal["ddp", "fsdp"]


@dataclass(frozen=True)
class DataConfig(JsonConfig):
    """The dataset and its splits."""

    section = "data"

    source: str = ""
    """A folder, a CSV, TSV or parquet file, tar shards (also s3://), hf-datasets:OWNER/NAME, or a named dataset."""
    val: str | None = None
    """Validation data; by default, the validation set of `source`, or else `val_fraction` of its training set."""
    test: str | None = None
    """Test data; by default, the test set of `source`, if it has one."""
    val_fraction: float = 0.1
    """Fraction of the training set that becomes the validation set if the dataset has none, above 0 and below 1."""
    train_fraction: float = 1.0
    """Fraction of the training set that is used, after the validation split; above 0, at most 1."""
    multi_label: bool = False
    """Whether an image can have more than one label; each class is then predicted independently."""
    balanced_sampling: bool = False
    """Whether every class is sampled equally often, so that images of rare classes are repeated."""
    num_workers: int = 2
    """Number of threads that load and augment batches ahead of time; 0 loads them in the training thread."""
    cache_gib: float = 4.0
    """Memory for decoded images, in GiB, half of it for the training set; 0 means no cache."""
    lanes: int = 64
    """Shards with an index: number of shards that a batch is taken from; the order of the samples depends on it."""
    shuffle_window: int = 1024
    """Shards with an index: number of consecutive samples of a lane that are shuffled."""
    shard_cache_gib: float = 20.0
    """Disk space for blocks of shards from an object store, in GiB per machine; 0 requests every image by itself."""

    def validate(self) -> None:
        self.check("val_fraction", 0 < self.val_fraction < 1, "above 0 and below 1")
        self.check("train_fraction", 0 < self.train_fraction <= 1, "above 0 and at most 1")
        self.check_range(0, 256, "num_workers")
        self.check("cache_gib", self.cache_gib >= 0, "at least 0")
        self.check_range(1, 65_536, "lanes")
        self.check_range(1, 2**24, "shuffle_window")
        self.check("shard_cache_gib", self.shard_cache_gib == 0 or self.shard_cache_gib >= 1, "0, or at least 1")


@dataclass(frozen=True)
class AugmentConfig(JsonConfig):
    """Augmentation of training images. The defaults change nothing; `presets.augmentation` has the levels of AugReg."""

    section = "augment"

    crop: Crop = "none"
    """Random crop: "resized" (Inception-style random resized crop), "shift" (random shift, zero padding), or "none"."""
    shift_limit: float = 0.125
    """Largest shift of crop "shift", as a fraction of the image's side."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest area of crop "resized", as fractions of the image."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest aspect ratio (width / height) of crop "resized"."""
    flip: float = 0.0
    """Probability of a horizontal flip, 0 to 1."""
    randaug_ops: int = 0
    """Number of RandAugment operations per image (Cubuk et al., 2020); 0 means none."""
    randaug_magnitude: float = 10.0
    """Magnitude of the RandAugment operations, 0 to 30; AugReg uses 10 to 20."""
    color_jitter: float = 0.0
    """Largest relative change of brightness, contrast and saturation, 0 to 1; 0 means none."""
    random_erasing: float = 0.0
    """Probability that a random rectangle is filled with noise (Zhong et al., 2020); 0 means none."""
    cutout: float = 0.0
    """Side of a square that is masked (DeVries and Taylor, 2017), as a fraction of the image's side; 0 means none."""
    mixup: float = 0.0
    """Alpha of mixup's Beta distribution (Zhang et al., 2018); 0 means none."""
    cutmix: float = 0.0
    """Alpha of CutMix's Beta distribution (Yun et al., 2019); 0 means none. With both, each pair uses one at random."""

    def validate(self) -> None:
        self.check_range(0, 1, "flip", "random_erasing", "cutout", "shift_limit", "color_jitter")
        self.check_range(0, 100, "mixup", "cutmix")
        self.check_range(0, 16, "randaug_ops")
        self.check_range(0, 30, "randaug_magnitude")
        self.check("scale", 0 < self.scale[0] <= self.scale[1] <= 1, "two fractions, 0 < low <= high <= 1")
        self.check("ratio", 0 < self.ratio[0] <= self.ratio[1], "two aspect ratios, 0 < low <= high")


@dataclass(frozen=True)
class OptimConfig(JsonConfig):
    """The optimizer."""

    section = "optim"

    name: Optimizer = "adamw"
    """Optimizer: AdamW, SGD with momentum, or Muon (for hidden matrices, with AdamW for all other parameters)."""
    lr: float = 1e-3
    """Peak learning rate, after the warmup."""
    weight_decay: float = 0.05
    """Weight decay, not of biases, norms, tokens and position embeddings; decoupled in AdamW and Muon."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    momentum: float = 0.9
    """Momentum of SGD and Muon, at least 0 and below 1."""
    muon_lr: float = 0.02
    """Peak learning rate of the parameters that Muon optimizes; `lr` is for the others."""
    clip_grad_norm: float = 1.0
    """Maximum norm of the gradient, as in clip_grad_norm_ of torch; 0 means no clipping."""
    sam_rho: float = 0.0
    """Radius rho of sharpness-aware minimization (SAM, Foret et al., 2021), at twice the cost; 0 means no SAM."""
    layer_decay: float = 1.0
    """Layer-wise learning rate decay: factor from each block to the one below it (as in BEiT); 1 means none."""
    head_lr_scale: float = 1.0
    """Factor on the learning rate of the head; 0 freezes the head."""

    def validate(self) -> None:
        for name in ("lr", "muon_lr"):
            self.check(name, getattr(self, name) > 0, "above 0")
        for name in ("weight_decay", "clip_grad_norm", "sam_rho", "head_lr_scale"):
            self.check(name, getattr(self, name) >= 0, "at least 0")
        self.check("betas", all(0 <= beta < 1 for beta in self.betas), "two numbers, at least 0 and below 1")
        self.check("momentum", 0 <= self.momentum < 1, "at least 0 and below 1")
        self.check("layer_decay", 0 < self.layer_decay <= 1, "above 0 and at most 1")


@dataclass(frozen=True)
class ScheduleConfig(JsonConfig):
    """The learning rate schedule, over steps or, in a run with a budget, over time."""

    section = "schedule"

    shape: ScheduleShape = "cosine"
    """How the learning rate falls after the warmup; "constant" keeps it at the peak."""
    warmup_fraction: float = 0.05
    """Length of the linear warmup, as a fraction of the run; 0 means none."""
    cooldown_fraction: float = 0.1
    """Length of the linear cooldown to zero that ends shape "rsqrt", as a fraction of the run; 0 means none."""
    min_lr_ratio: float = 0.0
    """Final learning rate of shapes "cosine" and "linear", as a fraction of the peak."""

    def validate(self) -> None:
        self.check_range(0, 1, "warmup_fraction", "cooldown_fraction", "min_lr_ratio")
        self.require(
            self.warmup_fraction + self.cooldown_fraction <= 1,
            f"schedule.warmup_fraction {self.warmup_fraction} and schedule.cooldown_fraction {self.cooldown_fraction} "
            "must not be more than 1 together.",
        )


@dataclass(frozen=True)
class DistillConfig(JsonConfig):
    """Knowledge distillation from a teacher, as in DeiT (Touvron et al., 2021)."""

    section = "distill"

    teacher: str | None = None
    """The teacher, a model reference such as hf:owner/name; by default, there is no distillation."""
    kind: Literal["hard", "soft"] = "hard"
    """Whether the student learns the teacher's most probable class ("hard") or its probabilities ("soft")."""
    weight: float = 0.5
    """Weight of the distillation loss, 0 to 1; the loss on the labels has the weight 1 - `weight`."""
    temperature: float = 3.0
    """Temperature that divides the logits of student and teacher in "soft" distillation."""

    def validate(self) -> None:
        self.check_range(0, 1, "weight")
        self.check("temperature", self.temperature > 0, "above 0")


@dataclass(frozen=True)
class ProgressiveResizeConfig(JsonConfig):
    """Progressive resizing: the first phase of a run trains on smaller images, whose steps cost less."""

    section = "progressive_resize"

    scale: float = 1.0
    """Image scale during the first phase, as a fraction of the image size; 1 means no first phase."""
    fraction: float = 0.5
    """Length of the first phase, as a fraction of the run."""

    def validate(self) -> None:
        self.check("scale", 0 < self.scale <= 1, "above 0 and at most 1")
        self.check_range(0, 1, "fraction")


@dataclass(frozen=True)
class Config(JsonConfig):
    """A training run."""

    name: str = "run"
    """Name of the run; its directory is runs/NAME by default."""
    seed: int = 0
    """Random seed of initialization, validation split, shuffling and augmentation."""
    data: DataConfig = field(default_factory=DataConfig)
    """The dataset and its splits."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """Augmentation of training images."""
    model: ModelConfig = field(default_factory=ViTConfig)
    """The architecture, for training from scratch; with `init`, only dropout, drop path and checkpointing apply."""
    init: str | None = None
    """Pretrained model to start from, with its architecture: a model reference; None means from scratch."""
    image_size: Size | None = None
    """Image size in pixels, to which position embeddings are resampled; by default, that of `init` or `model`."""
    progressive_resize: ProgressiveResizeConfig = field(default_factory=ProgressiveResizeConfig)
    """Smaller images in the first phase of the run (progressive resizing)."""
    head_init: Literal["zero", "probe"] = "zero"
    """Initial weights of a new head on `init`: "zero", or "probe", a logistic regression on frozen features."""
    freeze: tuple[str, ...] = ()
    """Weights to freeze: prefixes of parameter names, "all-but-head", or "first-third" (embeddings and blocks)."""
    lora_rank: int = 0
    """Rank of LoRA (Hu et al., 2022) on attention; other weights, except the head, are frozen. 0 means no LoRA."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The learning rate schedule."""
    epochs: float = 10.0
    """Length of the run in epochs, unless `steps` or `budget` is set."""
    steps: int | None = None
    """Length of the run in optimizer steps, instead of `epochs`."""
    budget: float | None = None
    """Length of the run in seconds, from the start of the command to its end, instead of `epochs`."""
    batch_size: int = 128
    """Number of images per optimizer step, in total over all processes."""
    grad_accum_steps: int = 1
    """Number of micro-batches into which each batch is split, to save memory; it must divide `batch_size`."""
    precision: Precision = "auto"
    """Number format of matmuls; "auto" picks bf16 if it is faster on this machine, which is measured."""
    parallel: Parallel = "ddp"
    """With torchrun: "ddp" keeps the whole model in every process; "fsdp" shards it (FSDP2), for large models."""
    dist_timeout: float = 600.0
    """Seconds until a job of several processes is aborted because one of them does not respond."""
    num_threads: int | None = None
    """Number of CPU threads of the model; by default, all cores. Results depend on it in the last bits."""
    ema: float = 0.0
    """Decay of the exponential moving average (EMA) of the weights, which is evaluated and saved; 0 means no EMA."""
    wise_ft_alpha: float = 1.0
    """WiSE-FT (Wortsman et al., 2022): weight of the fine-tuned model, averaged with `init`; 1 means no averaging."""

    label_smoothing: float = 0.0
    """Label smoothing (Szegedy et al., 2016), at least 0 and below 1; 0 means none."""
    class_weights: bool = False
    """Whether the loss weights classes by their inverse frequency."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    """Knowledge distillation from a teacher."""

    eval_every: float = 1.0
    """Epochs between evaluations on the validation set; more if a time budget requires it."""
    save_every: float = 300.0
    """Seconds between checkpoints, or less if the run has a short time budget; 0 saves one after every step."""
    keep_last: int = 2
    """Number of latest checkpoints to keep, besides the best one."""
    tta_flip: bool = False
    """Whether evaluation averages the predictions of an image and its horizontal flip (test-time augmentation)."""
    loggers: tuple[Logger, ...] = ()
    """Experiment trackers to log to, besides metrics.jsonl; they must be installed."""

    def validate(self) -> None:
        self._validate_length()
        self._validate_batch()
        self._validate_weights()
        self._validate_parallel()
        self.check("name", bool(self.name) and "/" not in self.name, "a name without slashes")
        self.check("seed", 0 <= self.seed < 2**63, "at least 0 and below 2**63")
        self.check("label_smoothing", 0 <= self.label_smoothing < 1, "at least 0 and below 1")
        self.check("eval_every", self.eval_every > 0, "above 0")
        self.check("dist_timeout", self.dist_timeout > 0, "above 0 seconds")
        self.check("save_every", self.save_every >= 0, "at least 0")
        self.check("keep_last", self.keep_last >= 1, "at least 1")
        distilled = isinstance(self.model, ViTConfig) and self.model.distillation
        self.require(
            not distilled or self.distill.teacher is not None or self.init is not None or not self.data.source,
            "model.distillation is true, so the run needs a teacher: set distill.teacher.",
        )

    def _validate_parallel(self) -> None:
        if self.parallel == "ddp":
            return
        self.require(
            self.optim.name != "muon",
            "parallel is fsdp, but optim.name is muon, which orthogonalizes whole matrices. Use --optim.name adamw, or "
            "--parallel ddp.",
        )
        self.require(
            self.head_init != "probe" or self.init is None,
            "parallel is fsdp, but head_init is probe, which fits the head on a whole model. Use --head-init zero, or "
            "--parallel ddp.",
        )

    def _validate_length(self) -> None:
        self.check("epochs", self.epochs > 0, "above 0")
        self.check("steps", self.steps is None or self.steps > 0, "above 0")
        self.check("budget", self.budget is None or self.budget > 0, "above 0 seconds")
        self.require(
            self.steps is None or self.budget is None,
            f"steps {self.steps} and budget {self.budget} are both given; set one of them to None.",
        )

    def _validate_batch(self) -> None:
        self.check_range(1, 2**20, "batch_size")
        self.check_range(1, 1024, "num_threads")
        divides = self.grad_accum_steps >= 1 and self.batch_size % self.grad_accum_steps == 0
        self.check("grad_accum_steps", divides, f"a divisor of batch_size {self.batch_size}")

    def _validate_weights(self) -> None:
        self.check("ema", 0 <= self.ema < 1, "at least 0 and below 1")
        self.check_range(0, 1024, "lora_rank")
        self.check("wise_ft_alpha", 0 < self.wise_ft_alpha <= 1, "above 0 and at most 1")
        self.require(
            self.init is not None or self.wise_ft_alpha == 1,
            f"wise_ft_alpha {self.wise_ft_alpha} interpolates with pretrained weights, so it needs init; set it to 1 "
            "to train from scratch.",
        )
        self.require(
            not (self.lora_rank and self.freeze),
            f"lora_rank {self.lora_rank} freezes all weights but the head already; set freeze to ().",
        )
        self.require(
            self.init is not None or "first-third" not in self.freeze,
            "freeze 'first-third' keeps pretrained weights, so it needs init; set freeze to () to train from scratch.",
        )
