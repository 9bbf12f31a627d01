"""Model configurations as plain data: `ViTConfig` and `ResNetConfig`.

Every field changes what the model computes or how it is regularized. Fields that a checkpoint does not state are filled
by the reader of its format (`checkpoints/`). This module knows nothing of torch, files or training.
"""

from dataclasses import dataclass
from typing import Literal

from .json_config import JsonConfig

Size = tuple[int, int]

# Larger than any published model, but small enough that a damaged or malicious file cannot exhaust memory.
MAX_BLOCKS, MAX_STAGES, MAX_UNITS = 512, 8, 512
MAX_CHANNELS, MAX_CLASSES, MAX_IMAGE_SIZE = 1024, 1_000_000, 16384
MAX_TABLE_BYTES = 2**32

# Fields without weights: a run may set them although the model comes from a checkpoint.
REGULARIZATION_FIELDS = ("dropout", "attention_dropout", "drop_path", "patch_dropout", "grad_checkpointing")

Stem = Literal["linear", "resnet", "conv"]
PosEmbed = Literal[
    "learned", "learned_2d", "relative", "sincos", "sincos_mae", "rotary", "none", "learned+rotary", "learned+relative"
]
Rope = Literal["patchword", "eva02", "pe", "axial", "mixed", "dinov3"]
Resample = Literal["google", "timm", "transformers", "torchvision", "dinov2", "siglip2"]
Pooling = Literal["class", "average", "attention", "class+average", "query"]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "swiglu"]
NormLayer = Literal["layer_norm", "rms_norm"]
AttentionPattern = Literal["global", "axial", "local"]
ResNetKind = Literal["bit", "cifar"]
WeightStandardization = Literal["google", "timm", "bit"]
Spatial = Literal["conv", "local", "axial"]
NonLocalForm = Literal["gaussian", "embedded", "dot", "concat"]


@dataclass(frozen=True)
class ViTConfig(JsonConfig):
    """A Vision Transformer. The defaults are the paper's ViT-B/16 for ImageNet."""

    section = "model"

    image_size: Size = (224, 224)
    """Height and width of the input image in pixels; one number means a square."""
    patch_size: Size = (16, 16)
    """Height and width of a patch, in pixels of the image or of the stem's feature map; one number means a square."""
    in_channels: int = 3
    """Number of image channels: 3 for RGB, 1 for grayscale."""
    num_classes: int = 1000
    """Number of classes; 0 removes the head, so that the model returns embeddings. A run takes it from its data."""
    embed_dim: int = 768
    """Width of the tokens, D in the paper."""
    depth: int = 12
    """Number of encoder blocks."""
    num_heads: int = 12
    """Number of attention heads in each block."""
    head_dim: int | None = None
    """Width of an attention head; by default embed_dim / num_heads."""
    mlp_dim: int = 3072
    """Width of the hidden layer of the MLP in each block."""

    stem: Stem = "linear"
    """What precedes the patch projection: nothing ("linear"), a ResNet (the paper's hybrids), or convolutions."""
    stem_layers: tuple[int, ...] = ()
    """Stages of the stem: units per stage ("resnet"), or channels per stage, each halving the image ("conv")."""
    stem_convs: int = 1
    """Number of convolutions in each stage of a "conv" stem."""
    stem_width: int = 64
    """Number of channels of the first convolution of a "resnet" stem; a multiple of 32."""
    weight_standardization: WeightStandardization = "google"
    """Whose weight standardization a "resnet" stem uses; they differ in epsilon and scaling."""
    patch_norm: bool = False
    """Whether LayerNorm is applied before and after the patch projection, as in vit-pytorch."""
    patch_bias: bool = True
    """Whether the patch projection has a bias; CLIP's has none."""
    norm_embed: bool = False
    """Whether a norm follows the patch projection, before positions are added (AIMv2)."""
    norm_pre: bool = False
    """Whether a norm follows the position embeddings, before the first block (CLIP)."""

    class_token: bool = True
    """Whether a learned class token ([CLS]) precedes the patches."""
    distillation: bool = False
    """Whether the model has a distillation token and a second head (DeiT)."""
    num_registers: int = 0
    """Number of register tokens (Darcet et al., 2024); 0 means none."""
    pos_embed: PosEmbed = "learned"
    """Positions: learned (1-D, as in the paper), learned 2-D, relative, sine-cosine, rotary (RoPE), two kinds, none."""
    pos_embed_prefix: int | None = None
    """Number of prefix tokens with a learned position embedding; by default, the class and distillation tokens."""
    relative_prefix: bool = False
    """Whether relative positions also have values for the class token (BEiT)."""
    rope: Rope = "patchword"
    """Whose rotary positions: they differ in coordinates, frequencies and layout (models/rope.py)."""
    rope_base: float | None = None
    """Base of the rotary frequencies, also called theta or temperature; by default, that of `rope`."""
    rope_reference: Size | None = None
    """Grid to which rotary coordinates are scaled ("eva02", "pe"); by default, they are not scaled."""
    rope_periods: tuple[float, ...] = ()
    """Rotary periods, if the checkpoint stores them, as DINOv3's do in bfloat16; by default, computed from the base."""
    local_attention_init: float = 0.0
    """How sharply each head of a new model with "relative" embeddings attends to one neighbor (ConViT); 0 means off."""
    pos_embed_resample: Resample = "google"
    """Whose method resamples the position embeddings when the image size changes."""

    attention_pattern: AttentionPattern = "global"
    """Which tokens a patch attends to: all, those of its row or column in turn ("axial"), or a window ("local")."""
    window_size: int = 7
    """Side of the window of "local" attention, in patches."""
    qkv_bias: bool = True
    """Whether the projection to queries, keys and values has a bias."""
    key_bias: bool = True
    """Whether that bias includes the keys; those of BEiT, EVA and DINOv3 have none."""
    out_bias: bool = True
    """Whether the output projection of attention has a bias."""
    qk_norm: bool = False
    """Whether a norm is applied to queries and keys."""
    attention_norm: bool = False
    """Whether a norm precedes the output projection of attention (sub-LN, EVA-02)."""
    mlp_norm: bool = False
    """Whether a norm precedes the last layer of each MLP (sub-LN, EVA-02)."""
    mlp_bias: bool = True
    """Whether the layers of each MLP have a bias; AIMv2's have none."""
    post_norm: bool = False
    """Whether LayerNorm follows each residual sum (the original Transformer) instead of preceding each branch (ViT)."""
    res_post_norm: bool = False
    """Whether LayerNorm follows each branch, inside the residual sum, instead of preceding it (Swin v2, timm's rpn)."""
    norm_layer: NormLayer = "layer_norm"
    """LayerNorm, or RMSNorm (AIMv2)."""
    norm_eps: float = 1e-6
    """Epsilon of every norm."""
    activation: Activation = "gelu"
    """Activation of the MLP: exact GELU, its tanh approximation, quick GELU (CLIP: x sigmoid(1.702 x)), or SwiGLU."""
    layer_scale: float | None = None
    """Initial value of LayerScale (CaiT) on each residual branch; by default, there is no LayerScale."""

    pooling: Pooling = "class"
    """How tokens become one vector: class token, mean of the patches, both, attention (MAP), or a query (AIMv2)."""
    pool_heads: int | None = None
    """Number of heads of attention pooling; by default, num_heads."""
    pool_mlp_dim: int | None = None
    """Width of the hidden layer of the MLP in attention pooling; by default, mlp_dim."""
    pool_prefix: bool = False
    """Whether attention pooling includes the prefix tokens (Perception Encoder)."""
    norm_after_pool: bool = False
    """Whether the final LayerNorm is applied to the pooled vector (timm's fc_norm) instead of the tokens."""
    pre_logits: int | None = None
    """Width of the tanh layer before the head, as in the paper's pre-training; by default, there is none."""
    projection_dim: int | None = None
    """Width of the linear projection into the space that CLIP shares with texts; by default, there is none."""
    final_norm: bool = True
    """Whether there is a norm after the last block, or after pooling."""

    dropout: float = 0.0
    """Dropout probability after the position embeddings, attention and both layers of each MLP; 0 means none."""
    attention_dropout: float = 0.0
    """Dropout probability of attention weights, which the paper does not drop; 0 means none."""
    drop_path: float = 0.0
    """Stochastic depth: drop probability of the last block's branches, linearly less in lower blocks; 0 means none."""
    patch_dropout: float = 0.0
    """Fraction of the patches that is dropped in training; 0 means none."""
    grad_checkpointing: bool = False
    """Whether blocks are recomputed in the backward pass: less memory, about a third more compute."""

    def validate(self) -> None:
        self._validate_ranges()
        self._validate_stem()
        self._validate_sizes()
        self._validate_pos_embed()
        self._validate_rope()
        self._validate_blocks()
        self._validate_pooling()

    def _validate_ranges(self) -> None:
        self.check_range(1, MAX_CHANNELS, "in_channels")
        self.check_range(0, MAX_CLASSES, "num_classes")
        self.check_range(1, 32768, "embed_dim")
        self.check_range(0, MAX_BLOCKS, "depth")
        self.check_range(1, 1024, "num_heads", "pool_heads", "window_size")
        self.check_range(0, 1024, "num_registers")
        self.check_range(1, 262144, "mlp_dim", "pool_mlp_dim", "pre_logits", "projection_dim")
        self.check_range(1, 4096, "head_dim", "stem_width")
        self.check_range(1, 16, "stem_convs")
        self.check_range(0, 10, "local_attention_init")
        for name in ("image_size", "patch_size", "rope_reference"):
            sides = getattr(self, name) or (1,)
            self.check(name, all(1 <= side <= MAX_IMAGE_SIZE for side in sides), f"between 1 and {MAX_IMAGE_SIZE:,}")
        for name in ("dropout", "drop_path", "patch_dropout"):
            self.check(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        self.check("norm_eps", self.norm_eps > 0, "above 0")

    def _validate_sizes(self) -> None:
        self.require(
            self.head_dim is not None or self.embed_dim % self.num_heads == 0,
            f"model.embed_dim {self.embed_dim} is not divisible by {self.num_heads} heads: correct model.num_heads, or "
            "set model.head_dim.",
        )
        for size, stride, side in zip(self.image_size, self.stride, ("height", "width"), strict=True):
            nearest = [multiple for multiple in (size // stride * stride, (size // stride + 1) * stride) if multiple]
            self.require(
                size % stride == 0,
                f"model.image_size: {side} {size} is not a multiple of {stride}, the pixels of one patch; "
                f"use {' or '.join(map(str, nearest))}.",
            )
        self.require(
            self.table_bytes < MAX_TABLE_BYTES,
            f"{self.num_patches} patches need {self.table_bytes / 2**30:.0f} GiB for position embeddings and attention "
            "masks; set a smaller model.image_size or a larger model.patch_size.",
        )

    def _validate_stem(self) -> None:
        layers = self.stem_layers
        self.check("stem_layers", len(layers) <= MAX_STAGES, f"at most {MAX_STAGES} stages")
        self.check("stem_layers", all(1 <= n <= 4096 for n in layers), "numbers between 1 and 4,096")
        if self.stem == "linear":
            self.check("stem_layers", not layers, 'empty for stem "linear"')
        elif self.stem == "conv":
            self.check("stem_layers", bool(layers), 'given for stem "conv", such as [64, 128]')
        else:
            self.check("stem_layers", sum(layers) <= MAX_UNITS, f"at most {MAX_UNITS} units in total")
            self.check("stem_width", self.stem_width % 32 == 0, "a multiple of 32, the groups of its GroupNorm")

    def _validate_pos_embed(self) -> None:
        kind, prefix = self.absolute_pos_embed, self.num_positioned
        self.check("pos_embed_prefix", 0 <= prefix <= self.num_prefix, f"0 to {self.num_prefix}, the prefix tokens")
        if not kind.startswith("learned"):
            self.check("pos_embed_prefix", not prefix, f"0 for pos_embed {kind!r}, which has no entries for them")
        unit = {"learned_2d": 2, "sincos": 4, "sincos_mae": 4}.get(kind, 1)
        self.check("embed_dim", self.embed_dim % unit == 0, f"divisible by {unit} for pos_embed {kind!r}")
        self.check("embed_dim", kind != "sincos" or self.embed_dim >= 8, "at least 8 for pos_embed 'sincos'")
        added = not self.has_relative and not self.has_rope and self.attention_pattern == "global"
        self.check(
            "patch_dropout",
            added or not self.patch_dropout,
            f"0 for pos_embed {self.pos_embed!r} with {self.attention_pattern} attention",
        )
        fits = self.has_relative and self.num_prefix == 1
        rule = "false without relative positions and one prefix token"
        self.check("relative_prefix", fits or not self.relative_prefix, rule)

    def _validate_rope(self) -> None:
        unit = 2 if self.rope == "mixed" else 4
        self.require(
            not self.has_rope or self.attention_dim % unit == 0,
            f"model.head_dim must be divisible by {unit} for pos_embed {self.pos_embed!r}, not {self.attention_dim}.",
        )
        self.check("rope", self.has_rope or self.rope == "patchword", "unset without rotary positions")
        for name in ("rope_base", "rope_reference", "rope_periods"):
            fits = self.rope in ("eva02", "pe") if name == "rope_reference" else self.rope != "mixed"
            rule = f"unset for pos_embed {self.pos_embed!r} and rope {self.rope!r}"
            self.check(name, (self.has_rope and fits) or not getattr(self, name), rule)
        self.check("rope_base", self.rope_base is None or self.rope_base > 0, "above 0")
        count = self.attention_dim // 4
        valid = not self.rope_periods or (len(self.rope_periods) == count and min(self.rope_periods) > 0)
        self.check("rope_periods", valid, f"{count} numbers above 0")

    def _validate_blocks(self) -> None:
        self.require(
            not (self.post_norm and self.res_post_norm),
            "model.post_norm and model.res_post_norm are both true: choose one.",
        )
        self.check("key_bias", self.qkv_bias or self.key_bias, "true without qkv_bias")

    def _validate_pooling(self) -> None:
        self.require(
            self.class_token or "class" not in self.pooling,
            f"model.pooling {self.pooling!r} needs a class token: set model.class_token to true.",
        )
        self.require(
            not self.distillation or (self.class_token and self.pooling == "class" and self.pre_logits is None),
            "model.distillation needs class_token true, pooling 'class' and pre_logits null.",
        )
        self.require(
            not (self.post_norm and self.norm_after_pool),
            "model.post_norm and model.norm_after_pool are both true, but a post-norm model has no final norm.",
        )
        self.check("norm_after_pool", self.final_norm or not self.norm_after_pool, "false without final_norm")
        self.require(
            self.projection_dim is None or (self.pre_logits is None and not self.distillation),
            "model.projection_dim needs pre_logits null and distillation false.",
        )
        attends = self.pooling in ("attention", "query")
        self.check("pool_heads", attends or self.pool_heads is None, f"unset for pooling {self.pooling!r}")
        has_mlp = self.pooling == "attention"
        self.check("pool_mlp_dim", has_mlp or self.pool_mlp_dim is None, f"unset for pooling {self.pooling!r}")
        self.check("pool_prefix", attends or not self.pool_prefix, f"false for pooling {self.pooling!r}")
        heads = self.pool_heads or self.num_heads
        self.require(
            not attends or self.embed_dim % heads == 0,
            f"model.embed_dim {self.embed_dim} is not divisible by {heads} heads of pooling; set model.pool_heads.",
        )

    @property
    def table_bytes(self) -> int:
        """Peak memory of position embeddings and masks that the model computes, which no file size limits."""
        patches, tokens = self.num_patches, self.num_patches + self.num_prefix
        size = 16 * patches * self.embed_dim if self.pos_embed.startswith("sincos") else 0
        if self.has_rope:
            heads = self.num_heads if self.rope == "mixed" else 1
            size += patches * self.attention_dim * (4 * self.depth * heads + 16)
        if self.has_relative or self.attention_pattern != "global":
            size += tokens**2 * ((12 if self.has_relative else 4) * self.depth + 32)
        return size

    @property
    def absolute_pos_embed(self) -> str:
        """Which embeddings are added to the tokens: "learned", ..., or "none"."""
        return "none" if self.pos_embed in ("relative", "rotary") else self.pos_embed.split("+")[0]

    @property
    def has_rope(self) -> bool:
        """Whether attention rotates queries and keys."""
        return self.pos_embed.endswith("rotary")

    @property
    def has_relative(self) -> bool:
        """Whether attention adds a learned bias for each offset."""
        return self.pos_embed.endswith("relative")

    @property
    def pre_norm(self) -> bool:
        """Whether norms precede the branches of a block, as in the paper."""
        return not self.post_norm and not self.res_post_norm

    @property
    def attention_dim(self) -> int:
        """Width of an attention head."""
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def num_positioned(self) -> int:
        """Number of leading prefix tokens that have a learned position embedding."""
        if self.pos_embed_prefix is not None:
            return self.pos_embed_prefix
        return self.class_token + self.distillation if self.absolute_pos_embed.startswith("learned") else 0

    @property
    def stem_stride(self) -> int:
        """Image pixels per pixel of the stem's feature map, along one side."""
        if self.stem == "resnet":
            return int(4 * 2 ** max(0, len(self.stem_layers) - 1))
        return int(2 ** len(self.stem_layers))

    @property
    def stride(self) -> Size:
        """Image pixels per patch, (height, width)."""
        return self.patch_size[0] * self.stem_stride, self.patch_size[1] * self.stem_stride

    @property
    def grid(self) -> Size:
        """Rows and columns of patches."""
        return self.image_size[0] // self.stride[0], self.image_size[1] // self.stride[1]

    @property
    def num_patches(self) -> int:
        """Number of patches of an image, N."""
        return self.grid[0] * self.grid[1]

    @property
    def num_prefix(self) -> int:
        """Number of tokens in front of the patches: class, distillation, registers, in this order."""
        return self.class_token + self.distillation + self.num_registers

    @property
    def map_channels(self) -> int:
        """Number of channels of what is split into patches: the image, or the stem's feature map."""
        if self.stem == "linear":
            return self.in_channels
        if self.stem == "conv":
            return self.stem_layers[-1]
        return self.stem_width * 4 * 2 ** (len(self.stem_layers) - 1) if self.stem_layers else self.stem_width

    @property
    def pooled_dim(self) -> int:
        """Width of the pooled vector."""
        return self.embed_dim * (2 if self.pooling == "class+average" else 1)

    @property
    def feature_dim(self) -> int:
        """Width of the image representation, the input of the head."""
        return self.pre_logits or self.projection_dim or self.pooled_dim


@dataclass(frozen=True)
class ResNetConfig(JsonConfig):
    """A ResNet: BiT's (Kolesnikov et al., 2020), the paper's convolutional baseline, or one for small images.

    BiT: pre-activation, GroupNorm, standardized weights. CIFAR: the ResNet of He et al. (2016) with a 3x3 root, units
    of two 3x3 convolutions, and batch norm.
    """

    section = "model"

    image_size: Size = (224, 224)
    """Height and width of the input image in pixels; one number means a square."""
    in_channels: int = 3
    """Number of image channels: 3 for RGB, 1 for grayscale."""
    num_classes: int = 1000
    """Number of classes; 0 removes the head, so that the model returns embeddings. A run takes it from its data."""
    layers: tuple[int, ...] = (3, 4, 6, 3)
    """Number of residual units in each stage."""
    width_factor: int = 1
    """Multiplies the number of channels of every layer."""
    kind: ResNetKind = "bit"
    """BiT's ResNet ("bit"), or one for small images ("cifar"): 16 x width_factor channels, doubled in each stage."""
    spatial: Spatial = "conv"
    """Layers of the units that see other pixels: 3x3 convolutions, attention in a window (SASA), axial attention."""
    spatial_stage: int = 0
    """The first stage with such attention, counted from 0; the stages before it keep convolutions."""
    spatial_window: int = 7
    """Side of the window of "local" attention, in pixels of the feature map; an odd number."""
    spatial_heads: int = 8
    """Number of attention heads of "local" and "axial" attention."""
    non_local: NonLocalForm | None = None
    """The pairwise function of a Non-local block before the last unit of the second last stage; none by default."""

    def validate(self) -> None:
        stages = len(self.layers)
        self.check("layers", 1 <= stages <= MAX_STAGES, f"1 to {MAX_STAGES} stages")
        self.check("layers", all(n >= 1 for n in self.layers), "numbers of at least 1")
        self.check("layers", sum(self.layers) <= MAX_UNITS, f"at most {MAX_UNITS} units in total")
        self.check_range(1, 16, "width_factor")
        self.check_range(1, MAX_CHANNELS, "in_channels")
        self.check_range(0, MAX_CLASSES, "num_classes")
        sides_fit = all(1 <= side <= MAX_IMAGE_SIZE for side in self.image_size)
        self.check("image_size", sides_fit, f"between 1 and {MAX_IMAGE_SIZE:,}")
        self._validate_spatial()

    def _validate_spatial(self) -> None:
        for name, needed in (("stage", "local axial"), ("window", "local"), ("heads", "local axial")):
            field, default = f"spatial_{name}", getattr(type(self), f"spatial_{name}")
            fits = self.spatial in needed.split()
            self.check(field, fits or getattr(self, field) == default, f"{default} for spatial {self.spatial!r}")
        self.check_range(0, len(self.layers) - 1, "spatial_stage")
        self.check_range(1, 63, "spatial_window")
        self.check("spatial_window", self.spatial_window % 2 == 1, "an odd number")
        self.check_range(1, 1024, "spatial_heads")
        width = self.base_width * 2**self.spatial_stage
        self.require(
            self.spatial == "conv" or width % (2 * self.spatial_heads) == 0,
            f"model.spatial_heads {self.spatial_heads}: {width} channels do not give each head an even number of them; "
            f"use a divisor of {width // 2}.",
        )

    @property
    def base_width(self) -> int:
        """Number of channels of the 3x3 convolutions in the first stage, doubled in each further stage."""
        return (64 if self.kind == "bit" else 16) * self.width_factor

    @property
    def stage_sizes(self) -> tuple[Size, ...]:
        """Height and width of the feature map of each stage."""
        first = 2 if self.kind == "bit" else 0  # the root of BiT halves the image twice
        height, width = self.image_size
        return tuple((-(-height // 2**n), -(-width // 2**n)) for n in range(first, first + len(self.layers)))

    @property
    def pooled_dim(self) -> int:
        """Width of the pooled vector."""
        return int((256 if self.kind == "bit" else 16) * self.width_factor * 2 ** (len(self.layers) - 1))


ModelConfig = ViTConfig | ResNetConfig
