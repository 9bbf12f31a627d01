"""The attention of a model as it happens, whichever fused kernel computes it.

Tools that hook a softmax find nothing where a fused kernel has none. Here torch itself tells of every attention, with
the queries, keys and mask that the kernel gets, so what is seen is what the model used. Pieces of images and heads
keep the memory for maps below `MEMORY`, or at one map of one head where that alone is larger.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..models import ViT

MEMORY = 2**28  # bytes for the maps of a piece, and for the copies that computing with them takes
COPIES = 4

# Called with the number of the attention (the blocks' in order, then an attention pool's), q, k, v and the mask; an
# answer other than None takes the place of what the kernel would have computed.
See = Callable[[int, Tensor, Tensor, Tensor, Tensor | None], Tensor | None]


class Watch(TorchFunctionMode):
    """`with Watch(see): model(images)`; a Watch is for one pass."""

    def __init__(self, see: See) -> None:
        super().__init__()
        self.see, self.calls = see, 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is not F.scaled_dot_product_attention:
            return function(*args, **kwargs)
        number, self.calls = self.calls, self.calls + 1
        q, k, v = args[:3]
        answer = self.see(number, q, k, v, kwargs.get("attn_mask"))
        return function(*args, **kwargs) if answer is None else answer


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """The map (B, H, N, N) that the kernel applies; rows sum to one."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    return (scores if mask is None else scores + mask).softmax(dim=-1)


@torch.inference_mode()
def each_map(model: ViT, images: Tensor, reduce: Callable[[int, slice, slice, Tensor], None]) -> None:
    """One pass; `reduce(layer, images, heads, weights)` gets every map of the blocks once, in pieces."""

    def see(number: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
        if number >= len(model.blocks):
            return
        for rows, heads in pieces(len(q), q.shape[1], q.shape[2]):
            reduce(number, rows, heads, attention_weights(q[rows, heads], k[rows, heads], mask_of(mask, heads)))

    with Watch(see):
        model.encode(images)


def mask_of(mask: Tensor | None, heads: slice) -> Tensor | None:
    """The part of an additive mask, (N, N) or (H, N, N), that belongs to these heads."""
    return mask[heads] if mask is not None and mask.ndim == 3 and len(mask) > 1 else mask


def pieces(images: int, heads: int, tokens: int) -> Iterator[tuple[slice, slice]]:
    """Images and heads whose maps fit into `MEMORY` together; one map of one head at least."""
    room = max(1, MEMORY // (COPIES * 4 * tokens**2))
    some_heads = min(heads, room)
    some_images = max(1, min(images, room // some_heads))
    for image in range(0, images, some_images):
        for head in range(0, heads, some_heads):
            yield slice(image, image + some_images), slice(head, head + some_heads)


def open_pass(model: ViT, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits, and all maps (B, H, N, N) as part of the computation, so that gradients reach them.

    The last map is (B, H, 1, N') over the patches where the model pools by attention.
    """
    maps: list[Tensor] = []

    def see(number: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        maps.append(attention_weights(q, k, mask))
        return maps[-1] @ v

    with Watch(see):
        logits = model(images)
    return logits, maps
