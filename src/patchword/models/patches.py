"""The grid of patches: its size, which images fit a model, and patches back to images. Images to patches: vit.py."""

from torch import Tensor

from ..config import Size, ViTConfig
from ..errors import ConfigError


def unpatchify(patches: Tensor, patch_size: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """Puts flattened patches `(B, N, C*P*P)` back together to images (B, C, H, W), the exact inverse of `patchify`.

    Args:
        patches: A batch of patches, row by row, each flattened channel first.
        patch_size: Height and width of a patch in pixels.
        grid: The number of rows and columns of patches.

    Raises:
        ConfigError: The shape of `patches` does not fit `patch_size` and `grid`.
    """
    b, n, d = patches.shape
    (ph, pw), (rows, columns) = patch_size, grid
    if n != rows * columns or d % (ph * pw):
        raise ConfigError(f"{n} patches of {d} values are not a {rows}x{columns} grid of {ph}x{pw} patches.")
    x = patches.reshape(b, rows, columns, d // (ph * pw), ph, pw)
    return x.permute(0, 3, 1, 4, 2, 5).reshape(b, d // (ph * pw), rows * ph, columns * pw)


def patch_grid(images: Tensor, config: ViTConfig) -> Size:
    """Returns rows and columns of patches; for flattened patches, those of the model."""
    if images.ndim == 3:
        return config.grid
    (h, w), stride = images.shape[-2:], config.stride
    return h // stride[0], w // stride[1]


def check_images(images: Tensor, config: ViTConfig, *, smaller: bool = False) -> None:
    """Raises a ConfigError unless `images` have the model's shape, or a smaller one if that is allowed."""
    expected = (config.in_channels, *config.image_size)
    if tuple(images.shape[1:]) == expected or (smaller and fits_inside(images, config)):
        return
    field = "image_size" if images.ndim == 4 and images.shape[1] == expected[0] else "in_channels"
    shape = ", ".join(map(str, expected))
    advice = f"To adapt its weights, load it with another {field}."
    if images.ndim == 3:
        advice = "To classify one image, use images[None]."
    raise ConfigError(
        f"The model takes images of shape (batch, channels, height, width) = (B, {shape}), "
        f"not {tuple(images.shape)}. {advice}"
    )


def fits_inside(images: Tensor, config: ViTConfig) -> bool:
    """Whether training may use images of this smaller size: position embeddings are interpolated to it."""
    if images.ndim != 4 or images.shape[1] != config.in_channels:
        return False
    sides = zip(images.shape[-2:], config.image_size, config.stride, strict=True)
    return all(n <= own and n % stride == 0 for n, own, stride in sides)
