"""The studies, each as a grid of changes to a base configuration."""

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
from .study import Cell, Study

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
RATES = (0.25, 1.0, 4.0)  # of the base's learning rates
SMALL_SIDE = 64  # up to here a ResNet is He et al.'s for CIFAR-10
ONE_RATE = "All models have the learning rate of the base, which suits some better than others."


def make_study(name: str, base: Config = SMALL) -> Study:
    """The study of that name, as changes to `base`, which must be a ViT that is trained from nothing."""
    if name not in STUDIES:
        near = difflib.get_close_matches(name, STUDIES, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"There is no study {name!r}.{hint} There are {', '.join(STUDIES)}.")
    if not isinstance(base.model, ViTConfig):
        raise ConfigError("A study starts from a recipe with a ViT, which it changes.")
    if name != "resolution" and (base.init or base.lora_rank or base.freeze):
        raise ConfigError("Models of this study have other shapes than weights to start from: give a recipe without.")
    if base.data.multi_label:
        raise ConfigError("A study needs one class for each picture; this recipe has several.")
    # Only at the end, so that nothing is chosen; at full size, since some variants cannot change theirs.
    return STUDIES[name](base.replace(eval_every=1e9, progressive_resize=ProgressiveResizeConfig(), loggers=()))


def vit(base: Config) -> ViTConfig:
    """The base's model on bare patches, as large as those that it sees now."""
    model = base.model
    assert isinstance(model, ViTConfig)
    return model.replace(stem="linear", stem_layers=(), stem_convs=1, patch_size=model.stride)


def stages(model: ViTConfig) -> int:
    """How often the image must be halved for as many tokens as the model has."""
    count = math.log2(model.stride[0])
    if model.stride[0] != model.stride[1] or count != int(count) or count < 2:
        raise ConfigError(f"Behind convolutions patches of 4, 8, 16 ... pixels can be had, not of {model.stride}.")
    return int(count)


def convolutional(model: ViTConfig) -> ViTConfig:
    """The same tokens, out of plain convolutions."""
    count = stages(model)
    widths = tuple(max(16, model.embed_dim >> (count - 1 - i)) for i in range(count))
    return model.replace(stem="conv", stem_layers=widths, stem_convs=1, patch_size=(1, 1))


def hybrid(model: ViTConfig) -> ViTConfig:
    """The same tokens, out of a ResNet, whose root halves the image twice."""
    units, width = ((1, 1, 1, 1), 32) if min(model.image_size) <= SMALL_SIDE else ((3, 4, 9, 3), 64)
    layers = units[: stages(model) - 1]
    return model.replace(stem="resnet", stem_layers=layers, stem_width=width, patch_size=(1, 1))


def resnet(model: ViTConfig) -> ResNetConfig:
    seen = {"image_size": model.image_size, "in_channels": model.in_channels}
    if min(model.image_size) <= SMALL_SIDE:
        return ResNetConfig(layers=(3, 3, 3), kind="cifar", **seen)  # type: ignore[arg-type]
    return ResNetConfig(layers=(3, 4, 6, 3), **seen)  # type: ignore[arg-type]


def families(base: Config) -> dict[str, ModelConfig]:
    model = vit(base)
    return {"ViT": model, "hybrid": hybrid(model), "ResNet": resnet(model)}


def data_size(base: Config) -> Study:
    model = vit(base)
    wide = model.replace(embed_dim=2 * model.embed_dim, num_heads=2 * model.num_heads, mlp_dim=2 * model.mlp_dim)
    cells = [
        Cell(name, part, base.replace(model=kind, data=base.data.replace(train_fraction=part)))
        for name, kind in {**families(base), "ViT, twice as wide": wide}.items()
        for part in (0.03, 0.1, 0.3, 1.0)
    ]
    return Study(
        "data-size", "How much data does it take?",
        "Accuracy against the part of the training pictures that is learnt from: where do the curves cross?",
        "The larger the data, the better ViT does against ResNets; on the smallest ones ResNets lead, and larger ViTs "
        "do worse than smaller ones (Figures 3 and 4).",
        "part of the training pictures", tuple(cells), "steps", logarithmic=True,
        limits="Few pictures are seen more often in the same steps, and their last weights are taken, where the paper "
        f"stopped early. {ONE_RATE} The paper's data are up to 300 million pictures.",
    )  # fmt: skip


def compute(base: Config) -> Study:
    cells = [
        Cell(name, f"{part:g} of the time", base.replace(model=kind), part)
        for name, kind in families(base).items()
        for part in (0.25, 0.5, 1.0)
    ]
    return Study(
        "compute", "What does a FLOP buy?",
        "Accuracy against the arithmetic spent in training, for ViT, hybrid and ResNet.",
        "ViTs need 2 to 4 times less compute than ResNets for the same accuracy; hybrids lead at small budgets only "
        "(Figure 5).",
        "training TFLOP", tuple(cells), "time", logarithmic=True, by_cost=True,
        limits=f"The paper's budgets begin where its data no longer hold ViT back. {ONE_RATE}",
    )  # fmt: skip


def positions(base: Config) -> Study:
    kinds = {"none": "none", "1-D": "learned", "2-D": "learned_2d", "relative": "relative"}
    kinds |= {"sin-cos": "sincos", "rotary": "rotary"}
    cells = [Cell("ViT", said, base.replace(model=vit(base).replace(pos_embed=kind))) for said, kind in kinds.items()]
    return Study(
        "positions", "Do positions matter, and which?", "The same model with each way to say where a patch stands.",
        "Without positions 61.4 %, with any 64.0 to 64.2 % (5-shot ImageNet, B/16): which kind hardly matters "
        "(Table 8).",
        "positions", tuple(cells), "steps",
        limits="The smaller a patch, the less it says by itself, and the more there is to gain from order.",
    )  # fmt: skip


def rated(base: Config, factor: float) -> OptimConfig:
    """All learning rates times a factor."""
    return base.optim.replace(lr=factor * base.optim.lr, muon_lr=factor * base.optim.muon_lr)


def by_rate(base: Config, kinds: dict[str, ViTConfig]) -> tuple[Cell, ...]:
    return tuple(
        Cell(name, factor, base.replace(model=kind, optim=rated(base, factor)))
        for name, kind in kinds.items()
        for factor in RATES
    )


def head(base: Config) -> Study:
    model = vit(base)
    kinds = {
        "class token": model.replace(class_token=True, pooling="class", norm_after_pool=False),
        "average": model.replace(class_token=False, pooling="average"),
    }
    return Study(
        "head", "Class token or average?", "Both ways to read the result, each over learning rates.",
        "Both work equally well, but need different learning rates (Figure 9); averaging looked worse only because it "
        "was run with the other's.",
        "learning rate, times the base's", by_rate(base, kinds), "steps", logarithmic=True,
    )  # fmt: skip


def norm(base: Config) -> Study:
    model = vit(base)
    kinds = {"before (ViT)": model, "behind (Transformer)": model.replace(post_norm=True, norm_after_pool=False)}
    return Study(
        "norm", "Norm before or behind?",
        "The norm before each half of a block, or behind its sum, over learning rates.",
        "ViT norms before, and says why only by citing others: deep models train more easily so.",
        "learning rate, times the base's", by_rate(base, kinds), "steps", logarithmic=True,
    )  # fmt: skip


def attention(base: Config) -> Study:
    model = vit(base)
    cells = [
        Cell("ViT", "global", base.replace(model=model)),
        Cell("ViT", "axial", base.replace(model=model.replace(attention_pattern="axial"))),
        Cell("ViT", "local, 5 x 5", base.replace(model=model.replace(attention_pattern="local", window_size=5))),
    ]
    return Study(
        "attention", "Must every patch see every other?", "Global attention against rows and columns, and neighbours.",
        "Axial attention does a little better than global at more compute (Figure 13).",
        "attention", tuple(cells), "steps",
        limits="Ours takes rows and columns by turns, block by block, and adds no arithmetic, unlike the paper's.",
    )  # fmt: skip


def resolution(base: Config) -> Study:
    start = base.init or "patchword:cifar10"
    config = read_checkpoint(start).config
    stride = config.stride if isinstance(config, ViTConfig) else (32, 32)
    sizes = sorted({tuple(max(1, round(f * n / s)) * s for n, s in zip(config.image_size, stride, strict=True))
                    for f in (1, 1.25, 1.5)})  # fmt: skip
    tuned = base if base.init else base.replace(init=start, optim=base.optim.replace(name="adamw", lr=3e-4))
    cells = [Cell("fine-tuned", size[0], tuned.replace(image_size=size)) for size in sizes]
    return Study(
        "resolution", "Does it help to look closer?",
        f"{start}, fine-tuned as long at its own size and at larger ones; positions are resampled.",
        "Fine-tuning at a higher resolution than in pre-training helps throughout.",
        "pixels", tuple(cells), "time",
        limits="Pictures that have no more pixels show nothing more when enlarged; what is gained then is more tokens.",
    )  # fmt: skip


def inductive_bias(base: Config) -> Study:
    model = vit(base)
    kinds: dict[str, ModelConfig] = {
        "patches": model,
        "local attention": model.replace(attention_pattern="local", window_size=5),
        "relative positions": model.replace(pos_embed="relative"),
        "convolutions first": convolutional(model),
        "ResNet": resnet(model),
    }
    cells = [
        Cell(f"{part:.0%} of the data", name, base.replace(model=kind, data=base.data.replace(train_fraction=part)))
        for part in (0.1, 1.0)
        for name, kind in kinds.items()
    ]
    return Study(
        "inductive-bias", "What do priors buy on few data?",
        "From bare patches to a ResNet: the more the model knows of neighbourhood beforehand, the less it must learn.",
        "ViT has much less image-specific bias than a CNN, and pays for it where data are few.",
        "model", tuple(cells), "steps",
        limits=f"Steps are equal, cost is not: the table has it. {ONE_RATE}",
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
}
