"""Images cut into patches, and back: the only 2-D structure a plain ViT is given, besides its positions."""

from torch import Tensor

from ..errors import ConfigError


def patchify(images: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """The paper's x_p: (B, C, H, W) to (B, N, C*P*P), patches row by row, each flattened channel first."""
    b, c, h, w = images.shape
    ph, pw = patch_size
    if h % ph or w % pw:
        raise ConfigError(f"An image of {h}x{w} cannot be cut into patches of {ph}x{pw}.")
    x = images.reshape(b, c, h // ph, ph, w // pw, pw)
    return x.permute(0, 2, 4, 1, 3, 5).reshape(b, (h // ph) * (w // pw), c * ph * pw)


def unpatchify(patches: Tensor, patch_size: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """The exact inverse of `patchify`: (B, N, C*P*P) to (B, C, H, W); `grid` is the rows and columns of patches."""
    b, n, d = patches.shape
    (ph, pw), (rows, columns) = patch_size, grid
    if n != rows * columns or d % (ph * pw):
        raise ConfigError(f"{n} patches of {d} numbers are not a {rows}x{columns} grid of {ph}x{pw} patches.")
    x = patches.reshape(b, rows, columns, d // (ph * pw), ph, pw)
    return x.permute(0, 3, 1, 4, 2, 5).reshape(b, d // (ph * pw), rows * ph, columns * pw)
