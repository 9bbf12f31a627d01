"""The studies: each is a grid of changes to a base configuration."""

import difflib
import math
from collections.abc import Callable

from ..checkpoints import read_checkpoint
from ..config import (
    AugmentConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ProgressiveResizeConfig,
    ResNetConfig,
    ScheduleConfig,
    ViTConfig,
)
from ..errors import ConfigError
from .bert_study import bert
from .equivariance import equivariance
from .gan_study import gan
from .resnet_attention import non_local, sasa
from .study import Cell, Study
from .text_studies import TEXT_STUDIES

SMALL = Config(
    name="study",
    data=DataConfig(source="cifar10", val_fraction=0.04),
    model=ViTConfig(
        image_size=(32, 32), patch_size=(4, 4), embed_dim=96, depth=6, num_heads=3, mlp_dim=192,
        class_token=False, pooling="average",
    ),
    augment=AugmentConfig(crop="shift", flip=0.5),
    optim=OptimConfig(name="muon", lr=2e-3, muon_lr=0.02, momentum=0.95, weight_decay=0.05),
    schedule=ScheduleConfig(shape="linear", warmup_fraction=0.05),
    batch_size=128,
)  # fmt: skip
LR_FACTORS = (0.25, 1.0, 4.0)  # times the learning rates of the base
MAX_SMALL_SIDE = 64  # pixels; for such images the ResNet is that of He et al. for CIFAR-10
SAME_LR = "All models use the learning rate of the base, which suits some better than others."


def make_study(name: str, base: Config | None = None) -> Study:
    """Make a study by name.

    Args:
        name: One of STUDIES or LINEAGE_STUDIES.
        base: The configuration that a study of STUDIES varies: by default SMALL, a ViT that is trained from scratch.

    Raises:
        ConfigError: There is no such study, or the base does not fit.
    """
    if name in LINEAGE_STUDIES:
        if base is not None:
            raise ConfigError(f"--recipe: the study {name} has models and data of its own. Leave --recipe out.")
        return LINEAGE_STUDIES[name]()
    base = base or SMALL
    if name not in STUDIES:
        names = [*STUDIES, *LINEAGE_STUDIES, "lineage"]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"There is no study {name!r}.{hint} There are {', '.join(names)}.")
    if not isinstance(base.model, ViTConfig):
        raise ConfigError("--recipe: a study varies a ViT, and this recipe has another model.")
    if name != "resolution" and (base.init or base.lora_rank or base.freeze):
        raise ConfigError(
            "--recipe: this study changes the architecture, so it needs a recipe without init, lora_rank and freeze."
        )
    if base.data.multi_label:
        raise ConfigError("--recipe: a study needs single-label data, and this recipe is multi-label.")
    # Evaluated only at the end, so that no checkpoint is selected. Some variants cannot change their image size.
    return STUDIES[name](base.replace(eval_every=1e9, progressive_resize=ProgressiveResizeConfig(), loggers=()))


def vit(base: Config) -> ViTConfig:
    """Return the base's model with a linear stem, and patches as large as its tokens are now."""
    model = base.model
    assert isinstance(model, ViTConfig)
    return model.replace(stem="linear", stem_layers=(), stem_convs=1, patch_size=model.stride)


def num_halvings(model: ViTConfig) -> int:
    """Return how often the image must be halved to get as many tokens as the model has."""
    count = math.log2(model.stride[0])
    if model.stride[0] != model.stride[1] or count != int(count) or count < 2:
        raise ConfigError(f"--recipe: a convolutional stem needs patches of 4, 8, 16, ... pixels, not {model.stride}.")
    return int(count)


def convolutional(model: ViTConfig) -> ViTConfig:
    """Return the model with as many tokens from a convolutional stem (Xiao et al. 2021)."""
    count = num_halvings(model)
    widths = tuple(max(16, model.embed_dim >> (count - 1 - i)) for i in range(count))
    return model.replace(stem="conv", stem_layers=widths, stem_convs=1, patch_size=(1, 1))


def hybrid(model: ViTConfig) -> ViTConfig:
    """Return the hybrid with as many tokens from a ResNet stem, whose root halves the image twice."""
    units, width = ((1, 1, 1, 1), 32) if min(model.image_size) <= MAX_SMALL_SIDE else ((3, 4, 9, 3), 64)
    layers = units[: num_halvings(model) - 1]
    return model.replace(stem="resnet", stem_layers=layers, stem_width=width, patch_size=(1, 1))


def resnet(model: ViTConfig) -> ResNetConfig:
    """Return a ResNet for the same images."""
    seen = {"image_size": model.image_size, "in_channels": model.in_channels}
    if min(model.image_size) <= MAX_SMALL_SIDE:
        return ResNetConfig(layers=(3, 3, 3), kind="cifar", **seen)  # type: ignore[arg-type]
    return ResNetConfig(layers=(3, 4, 6, 3), **seen)  # type: ignore[arg-type]


def families(base: Config) -> dict[str, ModelConfig]:
    """Return ViT, hybrid and ResNet."""
    model = vit(base)
    return {"ViT": model, "hybrid": hybrid(model), "ResNet": resnet(model)}


def data_size(base: Config) -> Study:
    """Vary the size of the training set (Figures 3 and 4 of the paper)."""
    model = vit(base)
    wide = model.replace(embed_dim=2 * model.embed_dim, num_heads=2 * model.num_heads, mlp_dim=2 * model.mlp_dim)
    cells = [
        Cell(name, fraction, base.replace(model=kind, data=base.data.replace(train_fraction=fraction)))
        for name, kind in {**families(base), "ViT, twice as wide": wide}.items()
        for fraction in (0.03, 0.1, 0.3, 1.0)
    ]
    return Study(
        "data-size", "How much data does it take?",
        "Accuracy against the fraction of the training set that is used: where do the curves cross?",
        "ViTs catch up with ResNets as the dataset grows. On the smallest datasets ResNets lead, and larger ViTs are "
        "worse than smaller ones (Figures 3 and 4).",
        "fraction of the training set", tuple(cells), "steps", logarithmic=True,
        limits="With equal steps, a small training set is seen more often. The final weights are evaluated, while the "
        f"paper used early stopping. {SAME_LR} The paper's datasets have up to 300 million images.",
    )  # fmt: skip


def compute(base: Config) -> Study:
    """Vary the training compute (Figure 5)."""
    cells = [
        Cell(name, f"{fraction:g} of the time", base.replace(model=kind), fraction)
        for name, kind in families(base).items()
        for fraction in (0.25, 0.5, 1.0)
    ]
    return Study(
        "compute", "Which model uses compute best?",
        "Accuracy against training compute, for ViT, hybrid and ResNet.",
        "ViTs need 2 to 4 times less compute than ResNets for the same accuracy; hybrids lead at small budgets only "
        "(Figure 5).",
        "training TFLOP", tuple(cells), "time", logarithmic=True, by_cost=True,
        limits=f"The paper's datasets are large enough not to limit ViT; this one is not. {SAME_LR}",
    )  # fmt: skip


def positions(base: Config) -> Study:
    """Vary the position embedding (Table 8)."""
    kinds = {"none": "none", "1-D": "learned", "2-D": "learned_2d", "relative": "relative"}
    kinds |= {"sin-cos": "sincos", "rotary": "rotary"}
    models = {label: vit(base).replace(pos_embed=kind) for label, kind in kinds.items()}
    cells = [Cell("ViT", label, base.replace(model=model)) for label, model in models.items()]
    return Study(
        "positions", "Do position embeddings matter, and which?",
        "The same model with each kind of position embedding.",
        "Without position embeddings 61.4 %, with any kind 64.0 to 64.2 % (5-shot ImageNet, B/16): the kind hardly "
        "matters (Table 8).",
        "position embedding", tuple(cells), "steps",
        limits="Small patches carry little information by themselves, so position matters more than in the paper.",
    )  # fmt: skip


def scale_lr(base: Config, factor: float) -> OptimConfig:
    """Multiply all learning rates by a factor."""
    return base.optim.replace(lr=factor * base.optim.lr, muon_lr=factor * base.optim.muon_lr)


def cells_by_lr(base: Config, kinds: dict[str, ViTConfig]) -> tuple[Cell, ...]:
    """Make a cell for each model and learning rate."""
    return tuple(
        Cell(name, factor, base.replace(model=kind, optim=scale_lr(base, factor)))
        for name, kind in kinds.items()
        for factor in LR_FACTORS
    )


def head(base: Config) -> Study:
    """Compare class token and average pooling over learning rates (Figure 9)."""
    model = vit(base)
    kinds = {
        "class token": model.replace(class_token=True, pooling="class", norm_after_pool=False),
        "average": model.replace(class_token=False, pooling="average"),
    }
    return Study(
        "head", "Class token or average pooling?", "Both kinds of pooling, each over learning rates.",
        "Both work equally well, but need different learning rates (Figure 9): average pooling looked worse only "
        "with the learning rate of the class token.",
        "learning rate, relative to the base", cells_by_lr(base, kinds), "steps", logarithmic=True,
    )  # fmt: skip


def norm(base: Config) -> Study:
    """Compare pre-norm and post-norm over learning rates."""
    model = vit(base)
    kinds = {"pre-norm (ViT)": model, "post-norm (Transformer)": model.replace(post_norm=True, norm_after_pool=False)}
    return Study(
        "norm", "Pre-norm or post-norm?",
        "LayerNorm before each sublayer, or after each residual sum, over learning rates.",
        "ViT uses pre-norm, and cites earlier work: deep models are easier to train with it.",
        "learning rate, relative to the base", cells_by_lr(base, kinds), "steps", logarithmic=True,
    )  # fmt: skip


def attention(base: Config) -> Study:
    """Compare global, axial and local attention (Figure 13)."""
    model = vit(base)
    cells = [
        Cell("ViT", "global", base.replace(model=model)),
        Cell("ViT", "axial", base.replace(model=model.replace(attention_pattern="axial"))),
        Cell("ViT", "local, 5 x 5", base.replace(model=model.replace(attention_pattern="local", window_size=5))),
    ]
    return Study(
        "attention", "Does every patch need to attend to every other?",
        "Global attention against axial and local attention.",
        "Axial attention is slightly better than global attention, at more compute (Figure 13).",
        "attention", tuple(cells), "steps",
        limits="Here blocks alternate between rows and columns, which adds no compute, unlike in the paper.",
    )  # fmt: skip


def resolution(base: Config) -> Study:
    """Fine-tune at higher resolutions (section 3.2)."""
    start = base.init or "patchword:cifar10"
    config = read_checkpoint(start).config
    stride = config.stride if isinstance(config, ViTConfig) else (32, 32)
    sizes = sorted({tuple(max(1, round(f * n / s)) * s for n, s in zip(config.image_size, stride, strict=True))
                    for f in (1, 1.25, 1.5)})  # fmt: skip
    tuned = base if base.init else base.replace(init=start, optim=base.optim.replace(name="adamw", lr=3e-4))
    cells = [Cell("fine-tuned", size[0], tuned.replace(image_size=size)) for size in sizes]
    return Study(
        "resolution", "Does a higher resolution help?",
        f"{start}, fine-tuned for equal time at its own and at larger image sizes; position embeddings are resampled.",
        "Fine-tuning at a higher resolution than pre-training helps in all cases.",
        "pixels", tuple(cells), "time",
        limits="Enlarging images beyond their own resolution adds no detail, only more tokens.",
    )  # fmt: skip


def inductive_bias(base: Config) -> Study:
    """Compare architectures with more and more locality, on little and on all data."""
    model = vit(base)
    kinds: dict[str, ModelConfig] = {
        "patches": model,
        "local attention": model.replace(attention_pattern="local", window_size=5),
        "relative positions": model.replace(pos_embed="relative"),
        "convolutions first": convolutional(model),
        "ResNet": resnet(model),
    }
    cells = [
        Cell(
            f"{fraction:.0%} of the data",
            name,
            base.replace(model=kind, data=base.data.replace(train_fraction=fraction)),
        )
        for fraction in (0.1, 1.0)
        for name, kind in kinds.items()
    ]
    return Study(
        "inductive-bias", "What does inductive bias give on little data?",
        "From plain patches to a ResNet: the more locality is built in, the less has to be learned.",
        "ViT has much less image-specific inductive bias than a CNN, which costs accuracy on little data.",
        "model", tuple(cells), "steps",
        limits=f"The number of steps is equal, the cost is not; see the table. {SAME_LR}",
    )  # fmt: skip


STUDIES: dict[str, Callable[[Config], Study]] = {
    "data-size": data_size,
    "compute": compute,
    "positions": positions,
    "head": head,
    "norm": norm,
    "attention": attention,
    "resolution": resolution,
    "inductive-bias": inductive_bias,
    "non-local": non_local,
    "sasa": sasa,
}
# Studies of what led to ViT, which vary no recipe.
LINEAGE_STUDIES: dict[str, Callable[[], Study]] = {
    **TEXT_STUDIES,
    "bert": bert,
    "equivariance": equivariance,
    "gan": gan,
}
