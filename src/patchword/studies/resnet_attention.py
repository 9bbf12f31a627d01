"""The studies of attention inside ResNets, before ViT: Non-local blocks, and attention instead of convolutions."""

from typing import Any

from ..config import Config, ResNetConfig, ViTConfig
from ..config.model import NonLocalForm
from ..errors import ConfigError
from .study import Cell, Study

MAX_SIDE = 64  # pixels; the ResNets are those of He et al. for CIFAR-10
FORMS: dict[str, NonLocalForm | None] = {
    "none": None,
    "Gaussian": "gaussian",
    "embedded Gaussian": "embedded",
    "dot product": "dot",
    "concatenation": "concat",
}
# Attention layers have fewer parameters than 3x3 convolutions; so many units give as many as one unit per stage.
SASA_MODELS: dict[str, dict[str, Any]] = {
    "3x3 convolutions": {"layers": (1, 1, 1)},
    "windows (SASA)": {
        "layers": (1, 4, 2), "spatial": "local", "spatial_stage": 1, "spatial_window": 5, "spatial_heads": 4,
    },
    "axial": {"layers": (1, 1, 2), "spatial": "axial", "spatial_stage": 1, "spatial_heads": 4},
}  # fmt: skip


def small_resnet(base: Config, divisor: int = 1) -> ResNetConfig:
    """Return a ResNet for the images of the base, each side of which is divided."""
    model = base.model
    assert isinstance(model, ViTConfig)
    height, width = model.image_size
    if max(height, width) > MAX_SIDE:
        raise ConfigError(f"--recipe: this study compares small ResNets, and needs image sides up to {MAX_SIDE}.")
    size = (height // divisor, width // divisor)
    return ResNetConfig(kind="cifar", layers=(1, 2, 1), image_size=size, in_channels=model.in_channels)


def non_local(base: Config) -> Study:
    """Compare the four forms of a Non-local block with none (Wang et al., 2018)."""
    resnet = small_resnet(base)
    cells = [Cell("ResNet", name, base.replace(model=resnet.replace(non_local=form))) for name, form in FORMS.items()]
    return Study(
        "non-local", "What does one Non-local block add to a ResNet?",
        "A small ResNet without and with one Non-local block, in which every position attends to all others.",
        "All four forms add about one point on video classification (72.3 to 73.3 % against 71.8 %, Kinetics), so "
        "that the softmax is not essential (Table 2a).",
        "Non-local block", tuple(cells), "steps",
        limits="One block in a short training, on small images. Compare differences with the spread over seeds.",
    )  # fmt: skip


def sasa(base: Config) -> Study:
    """Compare convolutions with attention in windows and along axes, at equal numbers of parameters."""
    resnet = small_resnet(base, divisor=2)
    cells = [
        Cell("ResNet", name, base.replace(image_size=resnet.image_size, model=resnet.replace(**changes)))
        for name, changes in SASA_MODELS.items()
    ]
    return Study(
        "sasa", "Can attention replace convolutions?",
        "A small ResNet whose second and third stage have 3x3 convolutions, attention in windows of 5x5 pixels, or "
        "position-sensitive axial attention, with nearly equal numbers of parameters. Images have half of their sides.",
        "On ImageNet, SASA reaches the accuracy of ResNet-50 with 29 % fewer parameters (Ramachandran et al., 2019), "
        "Axial-ResNet more (Wang et al., 2020).",
        "layers", tuple(cells), "steps",
        limits="Small images and short training favor convolutions, which need not learn that neighbors matter. See "
        "the minutes: attention around each pixel is slow on CPUs.",
    )  # fmt: skip
