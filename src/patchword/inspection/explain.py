"""All explanation methods behind one function, `explain`."""

from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ..config import ModelConfig, ViTConfig
from ..errors import ConfigError
from ..models import ViT
from ..models.resnet import ResNetBase
from .attention_rollout import head_attention, rollout
from .capture import MAP_COPIES, MAX_MAP_BYTES, non_local_weights
from .relevance import gradcam, relevance, token_gradients

Method = Literal["relevance", "tokens", "gradcam", "rollout", "attention"]
"""An explanation method. The first three explain one class; "rollout" and "attention" do not depend on the class."""
METHODS: tuple[Method, ...] = get_args(Method)
"""All explanation methods, the default of a ViT first."""
CLASS_METHODS: tuple[Method, ...] = ("relevance", "tokens", "gradcam")  # the others do not depend on the class
# With a linear head on average pooling, "tokens" equals "gradcam".
RESNET_METHODS: tuple[Method, ...] = ("gradcam",)
NON_LOCAL_METHODS: tuple[Method, ...] = ("gradcam", "attention")  # with a Non-local block whose weights are a softmax
NO_CLASSES = "The model has no head, so it has no classes to explain."


def methods_for(config: ModelConfig) -> tuple[Method, ...]:
    """Returns the explanation methods that a model supports, the default first.

    Args:
        config: The model's config, `model.config`. Without a head, there are no classes to explain, so only "rollout"
            and "attention" are left.
    """
    if isinstance(config, ViTConfig):
        methods = METHODS if config.depth else ()
    else:
        methods = NON_LOCAL_METHODS if config.non_local in ("gaussian", "embedded") else RESNET_METHODS
    return methods if config.num_classes else tuple(m for m in methods if m not in CLASS_METHODS)


def default_method(model: ViT | ResNetBase) -> Method:
    """Returns the default method for a model; raises a ConfigError if there is none."""
    methods = methods_for(model.config)
    if not methods:
        raise ConfigError(why_no_method(model.config), code="unsupported_by_model")
    return methods[0]


def why_no_method(config: ModelConfig) -> str:
    """Says why no method can explain a model."""
    if isinstance(config, ViTConfig) and not config.depth:
        return "A model without blocks (model.depth 0) has no attention, so no method can explain it."
    return NO_CLASSES


def explain(model: ViT | ResNetBase, images: Tensor, classes: Tensor | None, method: Method) -> np.ndarray:
    """Computes maps that show which patches of an image support a class.

    Args:
        model: The model, in evaluation mode.
        images: Normalized images, (B, C, H, W).
        classes: The index of the class to explain for each image, integers (B,); None for the methods "rollout" and
            "attention", which do not depend on the class.
        method: The method; `methods_for(model.config)` lists those that the model supports.

    Returns:
        Nonnegative maps (B, h, w) on the patch grid, or on a feature map of a ResNet. Larger means more
            relevant; each map has its own scale.

    Raises:
        ConfigError: The model does not support the method, images are not normalized, or a class does not exist.

    Examples:
        ```python
        import torch
        import patchword as pw
        from patchword import inspection

        classifier = pw.Classifier.load("patchword:cifar10")
        images = classifier.preprocess.normalize(classifier.pixels("cat.jpg")[None])
        classes = torch.tensor([classifier.labels.index("cat")])
        maps = inspection.explain(classifier.model, images, classes, "relevance")  # (1, 8, 8)
        ```
    """
    check_method(model.config, method)
    check_inputs(images, classes, model.config.num_classes, method)
    classes = torch.zeros(len(images), dtype=torch.long) if classes is None else classes
    size = max_batch_size(model)
    batches = zip(images.split(size), classes.split(size), strict=True)
    maps = [explain_batch(model, batch, batch_classes, method) for batch, batch_classes in batches]
    return torch.cat(maps).float().cpu().numpy()


def check_method(config: ModelConfig, method: str) -> None:
    """Raises a ConfigError if the model does not support the method."""
    supported = methods_for(config)
    if method in supported:
        return
    reason = f"This model does not support the method {method!r}."
    if method in CLASS_METHODS and not config.num_classes:
        reason = NO_CLASSES
    text = f"{reason} Supported: {', '.join(supported)}." if supported else why_no_method(config)
    raise ConfigError(text, code="unsupported_by_model")


def check_inputs(images: Tensor, classes: Tensor | None, num_classes: int, method: Method) -> None:
    """Raises a ConfigError unless these are normalized images and, if the method needs it, one class for each."""
    if not images.is_floating_point():
        raise ConfigError(
            f"explain takes normalized images (B, C, H, W), not {images.dtype}: use classifier.preprocess.normalize."
        )
    if method not in CLASS_METHODS and (classes is None or not num_classes):
        return
    if not isinstance(classes, Tensor) or classes.shape != (len(images),):
        raise ConfigError(f"explain takes one class for each of the {len(images)} images: torch.tensor([3, ...]).")
    if len(classes) and not 0 <= int(classes.min()) <= int(classes.max()) < num_classes:
        raise ConfigError(f"The model has the classes 0 to {num_classes - 1}, but classes is {classes.tolist()}.")


def explain_batch(model: ViT | ResNetBase, images: Tensor, classes: Tensor, method: Method) -> Tensor:
    """Explains images that fit into memory together."""
    if method == "gradcam":
        return gradcam(model, images, classes)
    if method == "tokens":
        return token_gradients(model, images, classes)
    if not isinstance(model, ViT):
        with torch.no_grad():
            return non_local_weights(model, images).mean(dim=(1, 2))  # over the positions that attend
    if method == "relevance":
        return relevance(model, images, classes)
    if method == "rollout":
        return rollout(model, images)
    assert method == "attention", f"The method {method!r} is not implemented."
    return head_attention(model, images)[:, -1].nanmean(dim=1)  # NaN: heads that this layer does not have


def max_batch_size(model: ViT | ResNetBase) -> int:
    """Returns how many images to explain at once: their maps and gradients take at most 4 x `MAX_MAP_BYTES`."""
    if not isinstance(model, ViT):
        return 8
    config = model.config
    tokens = config.num_prefix + config.num_patches
    return int(min(16, max(1, 4 * MAX_MAP_BYTES // (MAP_COPIES * 4 * config.depth * config.num_heads * tokens**2))))
