"""The studies, each as a grid of changes to a base configuration."""

from collections.abc import Callable

from ..config import (
    AugmentConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ResNetConfig,
    ScheduleConfig,
    ViTConfig,
)
from ..errors import ConfigError
from .study import Cell, Study

SMALL_MODEL = ViTConfig(image_size=(32, 32), patch_size=(4, 4), embed_dim=96, depth=6, num_heads=3, mlp_dim=192)
SMALL = Config(
    name="study",
    data=DataConfig(source="cifar10", val_fraction=0.04),
    model=SMALL_MODEL.replace(class_token=False, pooling="average"),
    augment=AugmentConfig(crop="shift", flip=0.5),
    optim=OptimConfig(name="muon", lr=2e-3, muon_lr=0.02, momentum=0.95, weight_decay=0.05),
    schedule=ScheduleConfig(shape="linear", warmup=0.05),
    batch_size=128,
    evaluate_every=1e9,  # only at the end: nothing is chosen
)


def make_study(name: str, base: Config = SMALL) -> Study:
    """The study of that name, as changes to `base`, which must be a ViT."""
    if name not in STUDIES:
        raise ConfigError(f"There is no study {name!r}; there are {', '.join(STUDIES)}.")
    if not isinstance(base.model, ViTConfig):
        raise ConfigError("A study starts from a recipe with a ViT, which it changes.")
    return STUDIES[name](base)


def vit(base: Config) -> ViTConfig:
    assert isinstance(base.model, ViTConfig)
    return base.model


def families(base: Config) -> dict[str, ModelConfig]:
    """The base ViT, one of twice the width, the hybrid and a ResNet, each for the same images."""
    model = vit(base)
    small = min(model.image_size) <= 64
    wide = model.replace(embed_dim=2 * model.embed_dim, num_heads=2 * model.num_heads, mlp_dim=2 * model.mlp_dim)
    root: dict[str, object] = {"stem": "resnet", "stem_layers": (1, 1), "stem_width": 32, "patch_size": (1, 1)}
    if not small:
        root = {"stem": "resnet", "stem_layers": (3, 4, 9), "stem_width": 64, "patch_size": (1, 1)}
    cifar = ResNetConfig(image_size=model.image_size, layers=(3, 3, 3), kind="cifar")
    resnet = cifar if small else ResNetConfig(image_size=model.image_size, layers=(3, 4, 6, 3))
    return {"ViT": model, "ViT, twice as wide": wide, "hybrid": model.replace(**root), "ResNet": resnet}


def data_size(base: Config) -> Study:
    cells = [
        Cell(name, fraction, base.replace(model=model, data=base.data.replace(train_fraction=fraction)))
        for name, model in families(base).items()
        for fraction in (0.03, 0.1, 0.3, 1.0)
    ]
    return Study(
        "data-size", "How much data does it take?",
        "Accuracy against the part of the training pictures that is learnt from: where do the curves cross?",
        "The larger the data, the better ViT does against ResNets; on the smallest ones ResNets lead, and larger ViTs "
        "do worse than smaller ones (Figures 3 and 4).",
        "part of the training pictures", tuple(cells), "time", logarithmic=True,
        limits="All of CIFAR-10 is 300 times smaller than ImageNet-21k: the side of the crossing where large ViTs win "
        "lies beyond it.",
    )  # fmt: skip


def compute(base: Config) -> Study:
    cells = [
        Cell(name, part, base.replace(model=model))
        for name, model in families(base).items()
        if name != "ViT, twice as wide"
        for part in (0.25, 0.5, 1.0)
    ]
    return Study(
        "compute", "What does a FLOP buy?",
        "Accuracy against the arithmetic spent in training, for ViT, hybrid and ResNet.",
        "ViTs need 2 to 4 times less compute than ResNets for the same accuracy; hybrids lead at small budgets only "
        "(Figure 5).",
        "training TFLOP", tuple(cells), "time", logarithmic=True,
        limits="The paper's budgets are a million times larger, and begin where its data no longer hold ViT back.",
    )  # fmt: skip


def positions(base: Config) -> Study:
    kinds = {"none": "none", "1-D": "learned", "2-D": "learned_2d", "relative": "relative"}
    kinds |= {"sin-cos": "sincos", "rotary": "rotary"}
    cells = [Cell("ViT", said, base.replace(model=vit(base).replace(positions=kind))) for said, kind in kinds.items()]
    return Study(
        "positions", "Do positions matter, and which?", "The same model with each way to say where a patch stands.",
        "Without positions 61.4 %, with any 64.0 to 64.2 % (5-shot ImageNet, B/16): which kind hardly matters "
        "(Table 8).",
        "positions", tuple(cells), "steps",
        limits="With 64 patches of 4 pixels there is more to gain from order than with 196 of 16: a bag of small "
        "patches says less.",
    )  # fmt: skip


def head(base: Config) -> Study:
    model = vit(base)
    kinds = {
        "class token": model.replace(class_token=True, pooling="class", norm_after_pool=False),
        "average": model.replace(class_token=False, pooling="average"),
    }
    cells = [
        Cell(name, lr, base.replace(model=kind, optim=base.optim.replace(lr=lr)))
        for name, kind in kinds.items()
        for lr in (5e-4, 2e-3, 8e-3)
    ]
    return Study(
        "head", "Class token or average?", "Both ways to read the result, each over learning rates.",
        "Both work equally well, but need different learning rates (Figure 9); averaging looked worse only because it "
        "was run with the other's.",
        "learning rate", tuple(cells), "steps", logarithmic=True,
    )  # fmt: skip


def norm(base: Config) -> Study:
    model = vit(base)
    kinds = {"before (ViT)": model, "behind (Transformer)": model.replace(post_norm=True, norm_after_pool=False)}
    cells = [
        Cell(name, lr, base.replace(model=kind, optim=base.optim.replace(lr=lr, muon_lr=10 * lr)))
        for name, kind in kinds.items()
        for lr in (5e-4, 2e-3, 8e-3)
    ]
    return Study(
        "norm", "Norm before or behind?",
        "The norm before each half of a block, or behind its sum, over learning rates.",
        "ViT norms before, and says why only by citing others: deep models train more easily so.",
        "learning rate", tuple(cells), "steps", logarithmic=True,
    )  # fmt: skip


def attention(base: Config) -> Study:
    spans = {"global": {}, "axial": {"attention": "axial"}, "local, 5 x 5": {"attention": "local", "window": 5}}
    cells = [
        Cell("ViT", name, base.replace(model=vit(base).replace(**change)))  # type: ignore[arg-type]
        for name, change in spans.items()
    ]
    return Study(
        "attention", "Must every patch see every other?", "Global attention against rows and columns, and neighbours.",
        "Axial attention does a little better than global at more compute (Figure 13).",
        "attention", tuple(cells), "steps",
    )  # fmt: skip


def resolution(base: Config) -> Study:
    side = max(vit(base).image_size)
    sizes = [side, side * 5 // 4, side * 3 // 2]
    start = base.replace(init="patchword:cifar10", optim=base.optim.replace(name="adamw", lr=3e-4))
    cells = [Cell("fine-tuned", size, start.replace(image_size=(size, size))) for size in sizes]
    return Study(
        "resolution", "Does it help to look closer?",
        "A model trained at one size, fine-tuned as long at this and at larger ones; positions are resampled.",
        "Fine-tuning at a higher resolution than in pre-training helps throughout.",
        "pixels", tuple(cells), "time",
        limits="Pictures of 32 pixels hold nothing more to be seen when enlarged; what is gained is more tokens.",
    )  # fmt: skip


def inductive_bias(base: Config) -> Study:
    model, all_families = vit(base), families(base)
    stem = model.replace(stem="conv", stem_layers=(32, model.embed_dim), stem_convs=1, patch_size=(1, 1))
    kinds: dict[str, ModelConfig] = {
        "patches": model,
        "local attention": model.replace(attention="local", window=5),
        "relative positions": model.replace(positions="relative"),
        "convolutions first": stem,
        "ResNet": all_families["ResNet"],
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
        "inductive-bias", "What do priors buy on few data?",
        "From bare patches to a ResNet: the more the model knows of neighbourhood beforehand, the less it must learn.",
        "ViT has much less image-specific bias than a CNN, and pays for it where data are few.",
        "model", tuple(cells), "time",
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
