"""The Vision Transformer of "An Image is Worth 16x16 Words", read top to bottom.

Shapes: B images, N tokens (prefix tokens, then patches row by row), D embed_dim, H heads, d width of a head, K classes.
What the paper's model does not need lives next door and is chosen by the config: other positions (positions.py),
attention spans (spans.py), poolers (pooling.py), stems (stems.py, resnet.py).
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..config import Size, ViTConfig
from ..errors import ConfigError
from .patches import patchify
from .pooling import make_pool
from .positions import Rotary, make_positions
from .spans import Bias, make_bias
from .stems import make_stem


class PatchEmbed(nn.Module):
    """One linear map for every patch: what a convolution with kernel = stride = P computes."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        patch_dim = config.map_channels * config.patch_size[0] * config.patch_size[1]
        eps = config.norm_eps
        self.norm_in = nn.LayerNorm(patch_dim, eps=eps) if config.patch_norm else nn.Identity()
        self.proj = nn.Linear(patch_dim, config.embed_dim)
        self.norm_out = nn.LayerNorm(config.embed_dim, eps=eps) if config.patch_norm else nn.Identity()

    def forward(self, patches: Tensor) -> Tensor:  # (B, N, C*P*P) -> (B, N, D)
        return self.norm_out(self.proj(self.norm_in(patches)))


class Attention(nn.Module):
    """Multi-head self-attention; queries, keys and values come from one matrix."""

    def __init__(self, config: ViTConfig, layer: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.dropout = config.num_heads, config.attention_dim, config.dropout
        inner = self.num_heads * self.head_dim
        norm = partial(nn.LayerNorm, self.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity
        self.qkv = nn.Linear(config.embed_dim, 3 * inner, bias=config.qkv_bias)
        self.q_norm, self.k_norm = norm(), norm()
        self.rotary = Rotary(config) if config.positions == "rotary" else nn.Identity()
        self.bias = make_bias(config, layer)
        self.out = nn.Linear(inner, config.embed_dim, bias=config.out_bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, self.num_heads, self.head_dim).transpose(1, 2) for t in self.three(x))  # (B, H, N, d)
        return self.rotary(self.q_norm(q)), self.rotary(self.k_norm(k)), v

    def three(self, x: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values, each (B, N, H*d)."""
        plain = type(self.qkv) is nn.Linear and not self.qkv._forward_hooks
        if torch.is_grad_enabled() or not plain or x.device.type != "cpu":
            return self.qkv(x).chunk(3, dim=-1)
        # On a CPU three products and three dense results are faster than one, product and attention together by 3 %.
        weights = self.qkv.weight.chunk(3)
        biases = (None, None, None) if self.qkv.bias is None else self.qkv.bias.chunk(3)
        return [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]

    def forward(self, x: Tensor, grid: Size | None = None) -> Tensor:  # (B, N, D) -> (B, N, D)
        q, k, v = self.project(x)
        dropout = self.dropout if self.training else 0.0
        bias = self.bias(grid)
        if q.dtype == torch.bfloat16 and q.device.type == "cpu" and q.requires_grad and not dropout:
            x = attend_in_steps(q, k, v, bias)
        else:
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)
        return self.out(x.transpose(1, 2).flatten(2))

    def weights(self, x: Tensor) -> Tensor:
        """The attention map (B, H, N, N) that `forward` applies inside its fused kernel; rows sum to one."""
        q, k, _ = self.project(x)
        scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
        bias = self.bias()
        return (scores if bias is None else scores + bias).softmax(dim=-1)


def attend_in_steps(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Attention as two products, all of it in the type of `q`, for training in bf16 on a CPU.

    There the fused kernel, with its backward, takes 2 to 9 times as long. Scale and bias go into the first product,
    and autocast, which would take the softmax in fp32, is kept out.
    """
    b, h, n, d = q.shape
    q, k, v = (t.reshape(b * h, n, d) for t in (q, k, v))
    with torch.autocast("cpu", enabled=False):
        if bias is None:
            scores = (q * d**-0.5) @ k.mT
        else:
            scores = torch.baddbmm(bias.to(q.dtype).expand(b, h, n, n).reshape(b * h, n, n), q, k.mT, alpha=d**-0.5)
        return (scores.softmax(dim=-1) @ v).view(b, h, n, d)


class MLP(nn.Module):
    """Two layers with GELU between; or SwiGLU, whose first layer holds gate and value."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        first = 2 * config.mlp_dim if self.activation == "swiglu" else config.mlp_dim
        self.fc1 = nn.Linear(config.embed_dim, first)
        self.fc2 = nn.Linear(config.mlp_dim, config.embed_dim)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        if self.activation == "swiglu":
            gate, value = x.chunk(2, dim=-1)
            x = F.silu(gate) * value
        elif x.requires_grad or self.fc1._forward_hooks:
            x = F.gelu(x, approximate=self.approximate)
        else:  # in place, since nobody else can see x: fresh memory for the widest tensor costs 7-12 % of the time
            x = torch.ops.aten.gelu_(x, approximate=self.approximate)
        return self.fc2(self.drop(x))


class Residual(nn.Module):
    """What happens to a branch before it is added: dropout, LayerScale, drop path (a whole branch, per image)."""

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__()
        self.drop, self.drop_path = nn.Dropout(config.dropout), drop_path
        scale = config.layer_scale
        self.gamma = None if scale is None else nn.Parameter(torch.full((config.embed_dim,), scale))

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        branch = self.drop(branch)
        if self.gamma is not None:
            branch = branch * self.gamma
        if self.training and self.drop_path > 0:
            keep = torch.rand(len(x), 1, 1, device=x.device, dtype=x.dtype) >= self.drop_path
            branch = branch * keep / (1 - self.drop_path)
        return x + branch


class Block(nn.Module):
    """z' = MSA(LN(z)) + z; z = MLP(LN(z')) + z'. With post_norm the norm follows the sum instead."""

    def __init__(self, config: ViTConfig, layer: int) -> None:
        super().__init__()
        drop_path = config.drop_path * layer / max(1, config.depth - 1)  # deeper blocks are dropped more often
        self.post_norm = config.post_norm
        self.norm1 = nn.LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.attention = Attention(config, layer)
        self.add1 = Residual(config, drop_path)
        self.norm2 = nn.LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.mlp = MLP(config)
        self.add2 = Residual(config, drop_path)

    def forward(self, x: Tensor, grid: Size | None = None) -> Tensor:  # (B, N, D) -> (B, N, D)
        """`grid`: rows and columns of patches, where they are not the model's own."""
        if self.post_norm:
            x = self.norm1(self.add1(x, self.attention(x, grid)))
            return self.norm2(self.add2(x, self.mlp(x)))
        x = self.add1(x, self.attention(self.norm1(x), grid))
        return self.add2(x, self.mlp(self.norm2(x)))


class ViT(nn.Module):
    """image -> patches -> tokens -> blocks -> norm -> pool -> head."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        dim, eps = config.embed_dim, config.norm_eps
        self.stem = make_stem(config)
        self.patch_embed = PatchEmbed(config)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim)) if config.class_token else None
        self.distillation_token = nn.Parameter(torch.zeros(1, 1, dim)) if config.distillation else None
        self.registers = nn.Parameter(torch.zeros(1, config.num_registers, dim)) if config.num_registers else None
        self.positions = make_positions(config)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.depth))
        norm_dim = config.pooled_dim if config.norm_after_pool else dim
        self.norm = nn.Identity() if config.post_norm else nn.LayerNorm(norm_dim, eps=eps)
        self.pool = make_pool(config)
        self.pre_logits = nn.Linear(config.pooled_dim, config.pre_logits) if config.pre_logits else None
        head_dim = config.pre_logits or config.pooled_dim
        self.head = nn.Linear(head_dim, config.num_classes) if config.num_classes else nn.Identity()
        has_second = config.distillation and config.num_classes
        self.head_distilled = nn.Linear(head_dim, config.num_classes) if has_second else None
        self.reset_parameters()

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W), or the flattened patches (B, N, C*P*P), to logits (B, K).

        A distilled model returns the mean of its two heads, as DeiT does at test time. Without a head (num_classes 0)
        the pooled features come back.
        """
        tokens = self.encode(images)
        logits = self.head(self.represent(tokens))
        if self.distillation_token is not None:
            logits = (logits + self.classify_distilled(tokens)) / 2
        return logits

    def forward_distilled(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the class head and of the distillation head, apart: what distillation trains."""
        if self.distillation_token is None:
            raise ConfigError("The model has no distillation token: build it with distillation=True.")
        tokens = self.encode(images)
        return self.head(self.represent(tokens)), self.classify_distilled(tokens)

    def pooled(self, images: Tensor) -> Tensor:
        """The image representation that the head reads, from the images: (B, D)."""
        return self.represent(self.encode(images))

    def encode(self, images: Tensor) -> Tensor:
        """All tokens after the last block and, unless it comes after pooling, the final norm: (B, N, D)."""
        x, grid = self.embed(images), self.grid_of(images)
        for block in self.blocks:
            again = self.config.checkpoint_blocks and self.training
            x = checkpoint(block, x, grid, use_reentrant=False) if again else block(x, grid)
        return x if self.config.norm_after_pool else self.norm(x)

    def embed(self, images: Tensor) -> Tensor:
        """Patch embeddings with prefix tokens and positions: (B, N, D)."""
        x = self.patch_embed(self.cut(images))
        keep = self.kept_patches(x) if self.training and self.config.patch_dropout > 0 else None
        return self.drop(self.positions(x, self.prefix(x.shape[0]), self.grid_of(images), keep))

    def grid_of(self, images: Tensor) -> Size:
        """Rows and columns of patches; of images that are patches already, the model's own."""
        if images.ndim == 3:
            return self.config.grid
        (h, w), stride = images.shape[-2:], self.config.stride
        return h // stride[0], w // stride[1]

    def cut(self, images: Tensor) -> Tensor:
        """Images to flattened patches, which themselves pass through."""
        patches = (self.config.num_patches, self.patch_embed.proj.in_features)
        if self.config.stem == "linear" and tuple(images.shape[1:]) == patches:
            return images
        expected = (self.config.in_channels, *self.config.image_size)
        if tuple(images.shape[1:]) != expected and not (self.training and self.resizable(images)):
            field = "image_size" if images.ndim == 4 and images.shape[1] == expected[0] else "in_channels"
            shape = ", ".join(map(str, expected))
            raise ConfigError(
                f"The model takes images of shape (batch, channels, height, width) = (B, {shape}), "
                f"not {tuple(images.shape)}. To adapt its weights, load it with another {field}."
            )
        return patchify(self.stem(images), self.config.patch_size)

    def resizable(self, images: Tensor) -> bool:
        """Whether training may go on with images of a smaller size: positions are fitted to it on the way."""
        if images.ndim != 4 or images.shape[1] != self.config.in_channels or not self.config.resizable:
            return False
        sides = zip(images.shape[-2:], self.config.image_size, self.config.stride, strict=True)
        return all(n <= own and n % stride == 0 for n, own, stride in sides)

    def prefix(self, batch: int) -> Tensor | None:
        parts = (self.class_token, self.distillation_token, self.registers)
        tokens: list[Tensor] = [t for t in parts if t is not None]
        return torch.cat(tokens, dim=1).expand(batch, -1, -1) if tokens else None

    def kept_patches(self, x: Tensor) -> Tensor:
        """For each image a random subset of patches, in order: (B, kept)."""
        b, n, _ = x.shape
        kept = max(1, round(n * (1 - self.config.patch_dropout)))
        return torch.rand(b, n, device=x.device).topk(kept, dim=1).indices.sort(dim=1).values

    def represent(self, tokens: Tensor) -> Tensor:
        """The image representation that the head reads: (B, D)."""
        x = self.pool(tokens)
        if self.config.norm_after_pool:
            x = self.norm(x)
        return x if self.pre_logits is None else torch.tanh(self.pre_logits(x))

    def classify_distilled(self, tokens: Tensor) -> Tensor:
        return tokens[:, 1] if self.head_distilled is None else self.head_distilled(tokens[:, 1])

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As the paper's code: Xavier for the blocks, LeCun for the patches, N(0, 0.02) positions, zero head."""
        if self.patch_embed.proj.weight.is_meta:
            return  # only names and shapes are wanted; random numbers on that device cost seconds of imports
        for name, parameter in self.named_parameters():
            if name.startswith(("positions.", "registers")) or name.endswith(".relative"):
                nn.init.normal_(parameter, std=0.02)
            elif name == "pool.probe":
                nn.init.normal_(parameter, std=self.config.embed_dim**-0.5)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.normal_(module.bias, std=1e-6)
        for module in self.modules():
            if isinstance(module, Attention):
                for part in module.qkv.weight.chunk(3):  # three maps in one matrix: each has its own fan-out
                    nn.init.xavier_uniform_(part)
                if module.qkv.bias is not None:
                    nn.init.zeros_(module.qkv.bias)
            if isinstance(module, Bias) and module.relative is not None and self.config.local_start:
                module.relative.copy_(module.looking_at_neighbours(self.config.local_start))
        nn.init.trunc_normal_(self.patch_embed.proj.weight, std=self.patch_embed.proj.in_features**-0.5)
        nn.init.zeros_(self.patch_embed.proj.bias)
        for head in (self.head, self.head_distilled):
            if isinstance(head, nn.Linear):
                nn.init.zeros_(head.weight)
                nn.init.zeros_(head.bias)

    def features(self, images: Tensor, layers: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Every intermediate by the name of the module that made it.

        "patch_embed", "positions" (all tokens, as the first block gets them), "blocks.0.attention", "blocks.0.mlp",
        "blocks.0", ..., "norm", "pool", "head"; `layers` limits the blocks that are kept (negative counts from the
        end).
        """
        chosen = self.layer_indices(layers)
        names = ["stem", "patch_embed", "positions", "norm", "pool", "pre_logits", "head", "head_distilled"]
        names += [f"blocks.{i}{part}" for i in chosen for part in ("", ".attention", ".mlp")]
        found: dict[str, Tensor] = {}

        def keep(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            found[name] = output

        modules = dict(self.named_modules())
        hooks = [modules[n].register_forward_hook(partial(keep, n)) for n in names if n in modules]
        try:
            self(images)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def attention_maps(self, images: Tensor, layers: Sequence[int] | None = None) -> dict[int, Tensor]:
        """The maps (B, H, N, N) of the chosen layers, recomputed from what each layer was given."""
        found: dict[int, Tensor] = {}

        def keep(layer: int, module: Attention, inputs: tuple[Tensor, ...]) -> None:
            found[layer] = module.weights(inputs[0])

        attentions = {i: self.get_submodule(f"blocks.{i}.attention") for i in self.layer_indices(layers)}
        hooks = [a.register_forward_pre_hook(partial(keep, i)) for i, a in attentions.items()]
        try:
            self.encode(images)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def layer_indices(self, layers: Sequence[int] | None) -> list[int]:
        depth = len(self.blocks)
        wrong = [i for i in layers or () if i not in range(-depth, depth)]
        if wrong:
            raise ConfigError(f"The model has {depth} layers, 0 to {depth - 1}; there is no layer {wrong[0]}.")
        return list(range(depth)) if layers is None else [i % depth for i in layers]
