"""The Vision Transformer of "An Image is Worth 16x16 Words" (Dosovitskiy et al., 2021), top to bottom.

    z_0  = [x_class; x_p^1 E; ...; x_p^N E] + E_pos          (1)  patchify, PatchEmbed, ViT.embed_patches
    z'_l = MSA(LN(z_{l-1})) + z_{l-1},    l = 1 ... L        (2)  Block
    z_l  = MLP(LN(z'_l)) + z'_l,          l = 1 ... L        (3)  Block
    y    = LN(z_L^0)                                         (4)  ViT.forward_features, ViT.forward_pool

MSA is in attention.py, E_pos in pos_embed.py, and the sizes in config/model.py. Options that the paper's model does not
use are off by default, and most live in other files of this package.

Shapes: B images, N tokens (patches row by row, after any prefix tokens), C channels, D embed_dim, P patch_size,
K classes.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config import Size, ViTConfig
from ..errors import ConfigError
from .attention import Attention
from .init import init_weights
from .layers import Branch, PostNorm, ResidualPostNorm, SwiGLU, activate, make_norm, patch_dropout_indices
from .patches import check_images, patch_grid
from .pooling import make_pool, make_pre_logits
from .pos_embed import make_pos_embed
from .stems import make_stem


def patchify(images: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """Cuts images (B, C, H, W) into flattened patches `(B, N, C*P*P)`, the paper's x_p.

    Patches are ordered row by row. Each is flattened channel first.

    Args:
        images: A batch of images.
        patch_size: Height and width of a patch in pixels.

    Raises:
        ConfigError: The image size is not a multiple of the patch size.
    """
    b, c, h, w = images.shape
    ph, pw = patch_size
    if h % ph or w % pw:
        raise ConfigError(f"An image of {h}x{w} is not divisible into patches of {ph}x{pw}.")
    x = images.reshape(b, c, h // ph, ph, w // pw, pw)
    return x.permute(0, 2, 4, 1, 3, 5).reshape(b, (h // ph) * (w // pw), c * ph * pw)


class PatchEmbed(nn.Module):
    """The linear projection E of every patch, the same as a convolution with kernel = stride = P."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        patch_dim = config.map_channels * config.patch_size[0] * config.patch_size[1]
        self.norm_in = make_norm(config, patch_dim, when=config.patch_norm)
        self.proj = nn.Linear(patch_dim, config.embed_dim, bias=config.patch_bias)
        self.norm_out = make_norm(config, when=config.patch_norm or config.norm_embed)

    def forward(self, patches: Tensor) -> Tensor:  # (B, N, C*P*P) -> (B, N, D)
        """Embeds flattened patches."""
        return self.norm_out(self.proj(self.norm_in(patches)))


class MLP(nn.Module):
    """Two layers with a GELU between them."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.fc1 = nn.Linear(config.embed_dim, config.mlp_dim, bias=config.mlp_bias)
        self.norm = make_norm(config, config.mlp_dim, when=config.mlp_norm)
        self.fc2 = nn.Linear(config.mlp_dim, config.embed_dim, bias=config.mlp_bias)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
        """Transforms each token by itself."""
        return self.fc2(self.norm(self.drop(activate(self.fc1(x), self.activation))))


class Block(nn.Module):
    """An encoder block: attention mixes the tokens, then an MLP transforms each token."""

    def __init__(self, config: ViTConfig, layer: int) -> None:
        super().__init__()
        self.norm1 = make_norm(config)
        self.attention = Attention(config, layer)
        self.add1 = Branch(config, layer)  # dropout, LayerScale, drop path: the identity by default
        self.norm2 = make_norm(config)
        self.mlp = SwiGLU(config) if config.activation == "swiglu" else MLP(config)
        self.add2 = Branch(config, layer)

    def forward(self, z: Tensor, grid: Size | None = None) -> Tensor:  # (B, N, D) -> (B, N, D)
        """`grid` is the rows and columns of patches, if they differ from the model's."""
        z = z + self.add1(self.attention(self.norm1(z), grid))  # (2)
        return z + self.add2(self.mlp(self.norm2(z)))  # (3)


class PostNormBlock(PostNorm, Block):
    """A block whose norms follow the residual sums."""


class ResidualPostNormBlock(ResidualPostNorm, Block):
    """A block whose norms follow the branches."""


class ViT(nn.Module):
    """The Vision Transformer: image -> patches -> tokens -> blocks -> norm -> pool -> head.

    In shapes, B is the number of images, C of channels, N of tokens (prefix tokens, then patches row by row) and K of
    classes; D is `embed_dim` and P the patch size.

    Args:
        config: The architecture.
        init: Whether to initialize the weights. A subclass that adds its own passes False and calls `init_weights`.
    """

    def __init__(self, config: ViTConfig, *, init: bool = True) -> None:
        super().__init__()
        if init and config.distillation:
            raise ConfigError("A model with a distillation token is a DistilledViT: use build_model(config).")
        self.config = config
        dim, block = config.embed_dim, PostNormBlock if config.post_norm else Block
        block = ResidualPostNormBlock if config.res_post_norm else block
        self.stem = make_stem(config)  # the identity; a ResNet in hybrids
        self.patch_embed = PatchEmbed(config)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim)) if config.class_token else None
        self.registers = nn.Parameter(torch.zeros(1, config.num_registers, dim)) if config.num_registers else None
        self.positions = make_pos_embed(config)
        self.drop = nn.Dropout(config.dropout)
        self.norm_pre = make_norm(config, when=config.norm_pre)
        self.blocks = nn.ModuleList(block(config, layer) for layer in range(config.depth))
        norm_dim = config.pooled_dim if config.norm_after_pool else dim
        self.norm = make_norm(config, norm_dim, when=config.final_norm and not config.post_norm)
        self.pool = make_pool(config)  # z_L^0, the class token: tokens[:, 0]
        self.pre_logits = make_pre_logits(config)  # the identity; a tanh layer in the paper's pre-training
        self.head = nn.Linear(config.feature_dim, config.num_classes) if config.num_classes else nn.Identity()
        if init:
            init_weights(self)

    def forward(self, images: Tensor) -> Tensor:
        """Returns the logits (B, K) of images (B, C, H, W), or of their flattened patches `(B, N, C*P*P)`.

        Without a head (`num_classes` 0), it returns image embeddings (B, D).
        """
        return self.head(self.embed_images(images))

    def embed_images(self, images: Tensor) -> Tensor:
        """Returns the image representation y (B, D), the input of the head."""
        return self.forward_pool(self.forward_features(images))

    def forward_features(self, images: Tensor) -> Tensor:
        """Returns all tokens (B, N, D) after the last block and the final norm, unless that comes after pooling."""
        z, grid = self.embed_patches(images), patch_grid(images, self.config)
        recompute = self.config.grad_checkpointing and self.training
        for block in self.blocks:
            z = checkpoint(block, z, grid, use_reentrant=False) if recompute else block(z, grid)
        return z if self.config.norm_after_pool else self.norm(z)

    def embed_patches(self, images: Tensor) -> Tensor:
        """Returns z_0 (B, N, D), the input of the first block: prefix and patch tokens plus position embeddings."""
        x = self.patch_embed(self.patchify(images))  # x_p E
        rate = self.config.patch_dropout if self.training else 0.0
        keep = patch_dropout_indices(x, rate) if rate else None
        grid = patch_grid(images, self.config)
        x = self.positions(x, self.prefix_tokens(x.shape[0]), grid, keep)  # [x_class; x_p E] + E_pos
        return self.norm_pre(self.drop(x))

    def patchify(self, images: Tensor) -> Tensor:
        """Returns x_p, the flattened patches `(B, N, C*P*P)` of images; flattened patches are returned unchanged."""
        flattened = (self.config.num_patches, self.patch_embed.proj.in_features)
        if self.config.stem == "linear" and tuple(images.shape[1:]) == flattened:
            return images
        check_images(images, self.config, smaller=self.training)
        return patchify(self.stem(images), self.config.patch_size)

    def prefix_tokens(self, batch: int) -> Tensor | None:
        """Returns the tokens in front of the patches, (B, num_prefix, D): x_class and registers; None without any."""
        tokens: list[Tensor] = [token for token in (self.class_token, self.registers) if token is not None]
        return torch.cat(tokens, dim=1).expand(batch, -1, -1) if tokens else None

    def forward_pool(self, tokens: Tensor) -> Tensor:
        """Pools tokens (B, N, D) to the image representation (B, D), by default the class token.

        A model with `pre_logits` (the paper's pre-training head) or a projection (CLIP) applies it, too.
        """
        y = self.pool(tokens)
        return self.pre_logits(self.norm(y) if self.config.norm_after_pool else y)
