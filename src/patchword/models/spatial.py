"""Attention inside ResNets, before ViT: Non-local blocks, stand-alone self-attention (SASA), axial attention.

Shapes: B images, C channels, height H and width W, h heads, d width of a head. All three are layers of feature maps,
(B, C, H, W), and project with 1x1 convolutions. As in the papers, scores are not divided by sqrt(d). Instead, queries
start smaller by that factor, so that the scores of a new layer have a variance of about one; axial attention has a
batch norm for that.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import NonLocalForm, ResNetConfig
from ..errors import ConfigError

BLOCK = 4  # side of the blocks of queries in `LocalAttention`; 8 is as fast and takes twice the memory
MASKED = -1e9  # added to a score instead of minus infinity, which a matmul with zeros would turn into NaN


class NonLocal(nn.Module):
    """z = W_z y + x, where y_i = sum_j f(x_i, x_j) g(x_j) / C(x) over all positions j (Wang et al., 2018; eq. 1, 6).

    The norm after W_z starts with gamma 0, so that a new block is the identity. Positions are not subsampled.
    """

    def __init__(self, channels: int, form: NonLocalForm, norm: nn.Module) -> None:
        super().__init__()
        self.form, inner = form, channels // 2
        if form != "gaussian":
            self.theta, self.phi = (nn.Conv2d(channels, inner, 1, bias=False) for _ in range(2))
        self.pair_weight = nn.Parameter(torch.zeros(2 * inner)) if form == "concat" else None  # w_f
        self.g = nn.Conv2d(channels, inner, 1, bias=False)
        self.weights = nn.Identity()  # a module, so that hooks can capture the weights
        self.out, self.norm = nn.Conv2d(inner, channels, 1, bias=False), norm  # W_z

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, C, H, W)
        g = self.g(x).flatten(2).mT  # (B, N, C/2), N = H*W
        y = self.weights(self.pairwise(x)) @ g  # (B, N, C/2): eq. 1
        return x + self.norm(self.out(y.mT.unflatten(2, x.shape[2:])))  # (B, C, H, W): eq. 6

    def pairwise(self, x: Tensor) -> Tensor:
        """Returns f(x_i, x_j) / C(x), the weight of position j for position i: (B, C, H, W) -> (B, N, N)."""
        if self.form == "gaussian":  # f = exp(x_i . x_j), C = sum_j f: eq. 2
            tokens = x.flatten(2)  # (B, C, N)
            return (tokens.mT @ tokens).softmax(dim=-1)
        theta, phi = self.theta(x).flatten(2), self.phi(x).flatten(2)  # (B, C/2, N) each
        if self.pair_weight is not None:  # f = ReLU(w_f . [theta_i, phi_j]), C = N: eq. 5
            first, second = self.pair_weight.chunk(2)  # (C/2) each
            scores = F.relu((first @ theta)[:, :, None] + (second @ phi)[:, None])  # (B, N, N)
        else:
            scores = theta.mT @ phi  # (B, N, N)
        if self.form == "embedded":  # f = exp(theta_i . phi_j), C = sum_j f: eq. 3
            return scores.softmax(dim=-1)
        return scores / scores.shape[-1]  # also f = theta_i . phi_j, C = N: eq. 4

    def reset_parameters(self) -> None:
        """Initializes what the Kaiming initialization of convolutions leaves out."""
        assert isinstance(self.norm.weight, Tensor)
        nn.init.zeros_(self.norm.weight)
        if self.form == "embedded":
            shrink_queries(self.theta, self.theta.out_channels)
        if self.pair_weight is not None:
            nn.init.normal_(self.pair_weight, std=len(self.pair_weight) ** -0.5)


class HeadProjections(nn.Module):
    """Base class: queries, keys and values of several heads, and 2x2 average pooling after attention if it strides."""

    def __init__(self, cin: int, cout: int, key_dim: int, heads: int, stride: int = 1) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k = (nn.Conv2d(cin, heads * key_dim, 1, bias=False) for _ in range(2))
        self.v = nn.Conv2d(cin, cout, 1, bias=False)
        self.pool = nn.AvgPool2d(2, ceil_mode=True) if stride == 2 else nn.Identity()


class LocalAttention(HeadProjections):
    """SASA (Ramachandran et al., 2019; eq. 3): y_i = sum_j softmax_j(q_i . k_j + q_i . r_{j-i}) v_j, j in a window.

    Half of r depends on the row offset, half on the column offset, for each head. Pixels outside of the image get no
    weight. Queries are computed in blocks of 4x4 pixels (Vaswani et al., 2021), with the M keys that any of them sees.
    """

    def __init__(self, cin: int, cout: int, window: int, heads: int, stride: int = 1) -> None:
        super().__init__(cin, cout, cout // heads, heads, stride)
        self.window, half = window, cout // heads // 2
        self.relative_rows, self.relative_columns = (nn.Parameter(torch.zeros(heads, half, window)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, C', H, W), or half of H and W
        height, width = x.shape[2:]
        q, k, v = (project(x).permute(0, 2, 3, 1) for project in (self.q, self.k, self.v))  # (B, H, W, C') each
        outside = torch.zeros_like(q[..., :1])  # (B, H, W, 1), padded below
        side, halo = BLOCK + self.window - 1, self.window // 2
        q = self.split_heads(cut_blocks(q, BLOCK, 0))  # (B', h, 16, d), B' = B * number of blocks
        k, v = (self.split_heads(cut_blocks(t, side, halo)) for t in (k, v))  # (B', h, M, d) each, M = side^2
        outside = cut_blocks(outside, side, halo, MASKED)[:, None]  # (B', 1, M, 1)
        scores = self.append_positions(q) @ self.append_offsets(k, outside).mT  # (B', h, 16, M)
        y = (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)  # (B', 16, C')
        y = join_blocks(y, height, width)  # (B, H, W, C')
        return self.pool(y.permute(0, 3, 1, 2))

    def append_positions(self, q: Tensor) -> Tensor:
        """Appends to a query its products with r for all rows and columns of keys: (B', h, 16, d) -> (B', h, 16, d').

        Keys are marked by their row and column (`append_offsets`), so that one matmul computes q . k + q . r.
        """
        inside = torch.arange(BLOCK, device=q.device)[:, None]
        offset = torch.arange(BLOCK + self.window - 1, device=q.device) - inside  # (4, side): 0 to window - 1 if near
        near = offset.clamp(0, self.window - 1)
        mask = (near != offset).to(q.dtype) * MASKED  # (4, side)
        first, second = q.unflatten(2, (BLOCK, BLOCK)).chunk(2, dim=-1)  # (B', h, 4, 4, d/2) each
        # (B', h, 4, 4, side) each: m is the row, or the column, of a key.
        rows = torch.einsum("bhijd,hdim->bhijm", first, self.relative_rows[..., near]) + mask[:, None]
        columns = torch.einsum("bhijd,hdjm->bhijm", second, self.relative_columns[..., near]) + mask
        return torch.cat([q, rows.flatten(2, 3), columns.flatten(2, 3), torch.ones_like(q[..., :1])], dim=-1)

    def append_offsets(self, k: Tensor, outside: Tensor) -> Tensor:
        """Appends to a key its row and column, one-hot, and the mask of the border: (B', h, M, d) -> (B', h, M, d')."""
        side = BLOCK + self.window - 1
        one_hot = torch.eye(side, dtype=k.dtype, device=k.device)
        marks = torch.cat([one_hot.repeat_interleave(side, dim=0), one_hot.repeat(side, 1)], dim=1)  # (M, 2*side)
        return torch.cat([k, marks.expand(*k.shape[:2], -1, -1), outside.expand(-1, self.heads, -1, -1)], dim=-1)

    def split_heads(self, blocks: Tensor) -> Tensor:  # (B', M, C') -> (B', h, M, d)
        """Gives each head its channels."""
        return blocks.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def reset_parameters(self) -> None:
        """Initializes what the Kaiming initialization of convolutions leaves out."""
        shrink_queries(self.q, self.q.out_channels // self.heads)
        for table in (self.relative_rows, self.relative_columns):
            nn.init.normal_(table)


def cut_blocks(x: Tensor, side: int, halo: int, padding: float = 0.0) -> Tensor:
    """Cuts an image into squares around its blocks of 4x4 pixels: (B, H, W, C) -> (B * blocks, side^2, C)."""
    bottom, right = (-size % BLOCK + halo for size in x.shape[1:3])
    x = F.pad(x, (0, 0, halo, right, halo, bottom), value=padding)
    x = x.unfold(1, side, BLOCK).unfold(2, side, BLOCK)  # (B, rows, columns, C, side, side)
    return x.permute(0, 1, 2, 4, 5, 3).flatten(3, 4).flatten(0, 2)


def join_blocks(x: Tensor, height: int, width: int) -> Tensor:
    """Joins blocks of 4x4 pixels, and crops what completed the last ones: (B * blocks, 16, C) -> (B, H, W, C)."""
    rows, columns = -(-height // BLOCK), -(-width // BLOCK)
    x = x.unflatten(1, (BLOCK, BLOCK)).unflatten(0, (-1, rows, columns))  # (B, rows, columns, 4, 4, C)
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :height, :width]


class AxialLayer(HeadProjections):
    """Position-sensitive attention along one axis (Axial-DeepLab, Wang et al., 2020; eq. 4).

    y_i = sum_j softmax_j(q_i . k_j + q_i . r^q_{j-i} + k_j . r^k_{j-i}) (v_j + r^v_{j-i}), each term of the scores
    after a batch norm, whose bias would cancel in the softmax. Heads share r; queries are half as wide as values.
    """

    def __init__(self, cin: int, cout: int, length: int, heads: int, stride: int = 1, *, vertical: bool) -> None:
        super().__init__(cin, cout, cout // heads // 2, heads, stride)
        self.length, self.vertical, d = length, vertical, cout // heads
        self.norm = nn.BatchNorm2d(3 * heads)
        self.norm.register_parameter("bias", None)
        self.relative_q, self.relative_k = (nn.Parameter(torch.zeros(2 * length - 1, d // 2)) for _ in range(2))
        self.relative_v = nn.Parameter(torch.zeros(2 * length - 1, d))

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, C', H, W), or half of H and W
        x = x.mT if self.vertical else x  # (B, C, N, L): N lines of L pixels
        q, k, v = (self.split_lines(project(x)) for project in (self.q, self.k, self.v))  # (B*N, h, L, d/2 or d)
        r_q, r_k, r_v = (self.by_pair(t, x.shape[3]) for t in (self.relative_q, self.relative_k, self.relative_v))
        terms = [q @ k.mT, torch.einsum("bhid,ijd->bhij", q, r_q), torch.einsum("bhjd,ijd->bhij", k, r_k)]
        scores = self.norm(torch.cat(terms, dim=1)).unflatten(1, (3, self.heads)).sum(dim=1)  # (B*N, h, L, L)
        weights = scores.softmax(dim=-1)
        y = weights @ v + torch.einsum("bhij,ijd->bhid", weights, r_v)  # (B*N, h, L, d)
        y = y.transpose(2, 3).flatten(1, 2).unflatten(0, (-1, x.shape[2])).transpose(1, 2)  # (B, C', N, L)
        return self.pool(y.mT if self.vertical else y)

    def split_lines(self, x: Tensor) -> Tensor:  # (B, h*d, N, L) -> (B*N, h, L, d)
        """Makes a sequence of each line."""
        return x.unflatten(1, (self.heads, -1)).permute(0, 3, 1, 4, 2).flatten(0, 1)

    def by_pair(self, table: Tensor, length: int) -> Tensor:
        """Looks up r_{j-i} for all pairs of pixels of a line: (2*length - 1, d) -> (L, L, d)."""
        if length > self.length:
            raise ConfigError(
                f"This model has relative positions for lines of {self.length} pixels, not {length}; "
                "adapt_model(model, image_size=...) resamples them.",
                code="image_too_large",
            )
        pixels = torch.arange(length, device=table.device)
        return table[pixels - pixels[:, None] + self.length - 1]

    def reset_parameters(self) -> None:
        """Initializes what the Kaiming initialization of convolutions leaves out."""
        for table in (self.relative_q, self.relative_k, self.relative_v):
            nn.init.normal_(table, std=table.shape[1] ** -0.5)


def make_attention(config: ResNetConfig, stage: int, cin: int, cout: int, stride: int) -> nn.Module:
    """Makes what replaces a 3x3 convolution of this stage; after attention, a stride of 2 is 2x2 average pooling."""
    heads, (height, width) = config.spatial_heads, config.stage_sizes[stage - (stride == 2)]
    if config.spatial == "local":
        return LocalAttention(cin, cout, config.spatial_window, heads, stride)
    return nn.Sequential(
        AxialLayer(cin, cout, height, heads, vertical=True),
        AxialLayer(cout, cout, width, heads, stride, vertical=False),
    )


@torch.no_grad()
def shrink_queries(projection: nn.Conv2d, dim: int) -> None:
    """Initializes the projection to queries of width `dim` so that new scores have a variance of about one."""
    nn.init.normal_(projection.weight, std=(projection.in_channels * dim) ** -0.5)
