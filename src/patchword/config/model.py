"""What a model is, as plain data.

Knows nothing of torch, files or training. Every field is something that changes what the model computes, or how it is
regularised; a field that a checkpoint does not state is filled by the reader of that family (`checkpoints/`).
"""

from dataclasses import dataclass
from typing import Literal

from .json_config import JsonConfig

Size = tuple[int, int]
MAX_BLOCKS, MAX_STAGES, MAX_UNITS = 512, 8, 512
MAX_TABLE_BYTES = 2**32  # bytes
REGULARIZATION_FIELDS = (
    "dropout",
    "drop_path",
    "patch_dropout",
    "grad_checkpointing",
)  # fields without weights, so that they
# can be asked for, too, where the rest of a model comes from a file

Stem = Literal["linear", "resnet", "conv"]
Positions = Literal["learned", "learned_2d", "relative", "sincos", "rotary", "none"]
Resample = Literal["google", "timm", "transformers", "torchvision", "dinov2"]
Pooling = Literal["class", "average", "attention", "class+average"]
Activation = Literal["gelu", "gelu_tanh", "swiglu"]
AttentionPattern = Literal["global", "axial", "local"]
ResNetKind = Literal["bit", "cifar"]
WeightStandardization = Literal["google", "timm", "bit"]


@dataclass(frozen=True)
class ViTConfig(JsonConfig):
    """A Vision Transformer. The defaults are the paper's ViT-B/16 for ImageNet."""

    image_size: Size = (224, 224)  # height, width; one number means square
    patch_size: Size = (16, 16)  # on the image, or on the stem's feature map
    in_channels: int = 3
    num_classes: int = 1000  # 0: no head, the model returns the pooled features
    embed_dim: int = 768
    depth: int = 12
    num_heads: int = 12
    head_dim: int | None = None  # None: embed_dim / num_heads
    mlp_dim: int = 3072

    stem: Stem = "linear"
    stem_layers: tuple[int, ...] = ()  # resnet: units per stage; conv: channels per stage, each halving the image
    stem_convs: int = 1  # conv: convolutions of a stage
    stem_width: int = 64  # resnet: channels of the root
    weight_standardization: WeightStandardization = (
        "google"  # resnet: whose formula standardises the convolution weights
    )
    patch_norm: bool = False  # LayerNorm before and after the patch projection, as vit-pytorch has it

    class_token: bool = True
    distillation: bool = False  # a second token and a second head (DeiT)
    num_registers: int = 0
    pos_embed: Positions = "learned"
    pos_embed_prefix: int | None = None  # prefix tokens with a learned position; None: class and distillation
    local_attention_init: float = (
        0.0  # relative: how firmly each head of a new model looks at one neighbour; 0: at all alike
    )
    pos_embed_resample: Resample = "google"  # whose rule resizes the positions when the image size changes

    attention_pattern: AttentionPattern = "global"
    window_size: int = 7  # side of the square a token sees, for local attention
    qkv_bias: bool = True
    out_bias: bool = True
    qk_norm: bool = False
    post_norm: bool = False  # norm after each residual (the original Transformer) instead of before (ViT)
    norm_eps: float = 1e-6
    activation: Activation = "gelu"
    layer_scale: float | None = None  # initial value

    pooling: Pooling = "class"
    norm_after_pool: bool = False  # timm's fc_norm: the final norm acts on the pooled vector
    pre_logits: int | None = None  # width of the tanh layer of the pre-training head

    dropout: float = 0.0
    drop_path: float = 0.0
    patch_dropout: float = 0.0
    grad_checkpointing: bool = False  # recompute the blocks in the backward pass: less memory, a third more work

    def validate(self) -> None:
        self._validate_ranges()
        self.require(
            self.head_dim is not None or self.embed_dim % self.num_heads == 0,
            f"embed_dim {self.embed_dim} cannot be divided among {self.num_heads} heads; give head_dim.",
        )
        for size, stride, name in zip(self.image_size, self.stride, ("height", "width"), strict=True):
            self.require(
                size % stride == 0,
                f"image {name} {size} is not a multiple of {stride}, the pixels of one patch; "
                f"use {max(stride, size // stride * stride)} or {(size // stride + 1) * stride}.",
            )
        self._validate_options()

    def _validate_ranges(self) -> None:
        # Wide enough for any ViT ever published; a damaged file must not make us build a monster.
        limits = {"in_channels": (1, 1024), "num_classes": (0, 1_000_000), "embed_dim": (1, 32768)}
        limits |= {"depth": (0, MAX_BLOCKS), "num_heads": (1, 1024), "mlp_dim": (1, 262144)}
        limits |= {"stem_convs": (1, 16), "stem_width": (1, 4096), "num_registers": (0, 1024), "window_size": (1, 1024)}
        for name, (low, high) in limits.items():
            self.require(low <= getattr(self, name) <= high, f"{name} must be between {low} and {high}.")
        for name in ("image_size", "patch_size"):
            self.require(all(1 <= v <= 16384 for v in getattr(self, name)), f"{name} must be between 1 and 16384.")
        self.require(len(self.stem_layers) <= MAX_STAGES, f"stem_layers has more than {MAX_STAGES} stages.")
        self.require(all(1 <= n <= 4096 for n in self.stem_layers), "stem_layers must be between 1 and 4096.")
        for name in ("dropout", "drop_path", "patch_dropout"):
            self.require(0 <= getattr(self, name) < 1, f"{name} must be at least 0 and below 1.")
        self.require(self.norm_eps > 0, "norm_eps must be positive.")
        self.require(0 <= self.local_attention_init <= 10, "local_attention_init must be between 0 and 10.")
        self.require(self.head_dim is None or 1 <= self.head_dim <= 4096, "head_dim must be between 1 and 4096.")
        self.require(self.pre_logits is None or 1 <= self.pre_logits <= 262144, "pre_logits must be 1 to 262144.")

    def _validate_options(self) -> None:
        has_class = self.class_token or "class" not in self.pooling
        self.require(has_class, f"pooling {self.pooling!r} needs class_token.")
        self.require(
            not self.distillation or (self.class_token and self.pooling == "class" and self.pre_logits is None),
            "distillation needs class_token and class pooling, and has no pre_logits.",
        )
        self.require(self.stem != "conv" or bool(self.stem_layers), "a conv stem needs stem_layers, e.g. [64, 128].")
        self.require(
            self.stem != "resnet" or self.stem_width % 32 == 0,
            f"stem_width {self.stem_width}: a resnet stem normalises in 32 groups, so it must be a multiple of 32.",
        )
        few = self.stem != "resnet" or sum(self.stem_layers) <= MAX_UNITS
        self.require(few, f"a resnet stem has at most {MAX_UNITS} units.")
        self.require(self.stem != "linear" or not self.stem_layers, "a linear stem has no stem_layers.")
        self.require(not (self.post_norm and self.norm_after_pool), "post_norm has no final norm to put after pooling.")
        self.require(
            0 <= self.num_positioned <= self.num_prefix,
            f"pos_embed_prefix {self.pos_embed_prefix}: the model has {self.num_prefix} prefix tokens.",
        )
        self.require(
            not self.pos_embed_prefix or self.pos_embed in ("learned", "learned_2d"),
            f"pos_embed {self.pos_embed!r} has no entries for prefix tokens; pos_embed_prefix must be 0.",
        )
        unit = {"learned_2d": 2, "sincos": 4}.get(self.pos_embed, 1)
        self.require(self.embed_dim % unit == 0, f"pos_embed {self.pos_embed!r} needs embed_dim divisible by {unit}.")
        self.require(self.pos_embed != "sincos" or self.embed_dim >= 8, "pos_embed 'sincos' needs embed_dim >= 8.")
        self.require(
            self.pos_embed != "rotary" or self.attention_dim % 4 == 0, "rotary positions need head_dim in fours."
        )
        self.require(
            not self.patch_dropout
            or (self.pos_embed not in ("relative", "rotary") and self.attention_pattern == "global"),
            "patch_dropout needs positions that are added to the tokens, and global attention.",
        )
        self.require(
            self.table_bytes < MAX_TABLE_BYTES,
            f"{self.num_patches} patches need {self.table_bytes / 2**30:.0f} GiB for positions and attention masks.",
        )

    @property
    def table_bytes(self) -> int:
        """Memory for what the model computes instead of loading it, at its peak: no file's size is a limit to it."""
        patches, tokens = self.num_patches, self.num_patches + self.num_prefix
        size = 16 * patches * self.embed_dim if self.pos_embed == "sincos" else 0
        if self.pos_embed == "rotary":
            size += patches * self.attention_dim * (4 * self.depth + 16)
        if self.pos_embed == "relative" or self.attention_pattern != "global":
            size += tokens**2 * ((12 if self.pos_embed == "relative" else 4) * self.depth + 32)
        return size

    @property
    def attention_dim(self) -> int:
        """Width of one head."""
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def num_positioned(self) -> int:
        """How many leading prefix tokens have a learned position of their own."""
        if self.pos_embed_prefix is not None:
            return self.pos_embed_prefix
        return self.class_token + self.distillation if self.pos_embed in ("learned", "learned_2d") else 0

    @property
    def stem_stride(self) -> int:
        """How many image pixels one pixel of the stem's feature map covers, along one side."""
        if self.stem == "resnet":
            return 4 * 2 ** max(0, len(self.stem_layers) - 1)
        return int(2 ** len(self.stem_layers))

    @property
    def stride(self) -> Size:
        """Image pixels per token, (height, width)."""
        return self.patch_size[0] * self.stem_stride, self.patch_size[1] * self.stem_stride

    @property
    def grid(self) -> Size:
        """Rows and columns of patches."""
        return self.image_size[0] // self.stride[0], self.image_size[1] // self.stride[1]

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def resizable(self) -> bool:
        """Whether the model can be trained on smaller pictures than its own."""
        return self.pos_embed != "rotary"

    @property
    def num_prefix(self) -> int:
        """Tokens in front of the patches: class, distillation, registers, in this order."""
        return self.class_token + self.distillation + self.num_registers

    @property
    def map_channels(self) -> int:
        """Channels of what the patches are cut from: the image, or the stem's feature map."""
        if self.stem == "linear":
            return self.in_channels
        if self.stem == "conv":
            return self.stem_layers[-1]
        return self.stem_width * 4 * 2 ** (len(self.stem_layers) - 1) if self.stem_layers else self.stem_width

    @property
    def pooled_dim(self) -> int:
        return self.embed_dim * (2 if self.pooling == "class+average" else 1)


@dataclass(frozen=True)
class ResNetConfig(JsonConfig):
    """A BiT ResNet (pre-activation, GroupNorm, standardised weights): the paper's convolutional baseline.

    Or, for small images, the CIFAR ResNet of He et al.: 3x3 root, units of two 3x3 convolutions, batch norm.
    """

    image_size: Size = (224, 224)
    in_channels: int = 3
    num_classes: int = 1000  # 0: no head, the model returns the pooled features
    layers: tuple[int, ...] = (3, 4, 6, 3)
    width_factor: int = 1
    kind: ResNetKind = "bit"  # cifar: 16 channels times width_factor in the first stage, doubled in each other

    def validate(self) -> None:
        self.require(1 <= len(self.layers) <= MAX_STAGES, f"layers must have 1 to {MAX_STAGES} stages.")
        self.require(all(n >= 1 for n in self.layers), "layers must have at least one unit each.")
        self.require(sum(self.layers) <= MAX_UNITS, f"layers must have at most {MAX_UNITS} units together.")
        self.require(1 <= self.width_factor <= 16, "width_factor must be between 1 and 16.")
        self.require(1 <= self.in_channels <= 1024, "in_channels must be between 1 and 1024.")
        self.require(0 <= self.num_classes <= 1_000_000, "num_classes must be between 0 and 1,000,000.")
        self.require(all(1 <= v <= 16384 for v in self.image_size), "image_size must be between 1 and 16384.")

    @property
    def pooled_dim(self) -> int:
        return (256 if self.kind == "bit" else 16) * self.width_factor * 2 ** (len(self.layers) - 1)


ModelConfig = ViTConfig | ResNetConfig
