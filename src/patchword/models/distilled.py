"""DeiT's distilled ViT (Touvron et al., 2021): a second token with its own head learns from a teacher."""

import torch
from torch import Tensor, nn

from ..config import ViTConfig
from .init import init_weights
from .vit import ViT


class DistilledViT(ViT):
    """A ViT with a distillation token behind the class token, and a second head that reads it."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config, init=False)
        self.distillation_token = nn.Parameter(torch.zeros(1, 1, config.embed_dim))
        classes = config.num_classes
        self.head_distilled = nn.Linear(config.embed_dim, classes) if classes else nn.Identity()
        init_weights(self)

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits (B, K), the mean of the two heads, as in DeiT at test time."""
        logits, distilled = self.forward_distilled(images)
        return (logits + distilled) / 2

    def forward_distilled(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits of the class head and of the distillation head, (B, K) each, for distillation."""
        return self.forward_heads(self.forward_features(images))

    def forward_heads(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the same from the tokens (B, N, D) of `forward_features`."""
        return self.head(self.forward_pool(tokens)), self.head_distilled(tokens[:, 1])

    def prefix_tokens(self, batch: int) -> Tensor:
        """Returns x_class, the distillation token, and registers if there are any."""
        present = (self.class_token, self.distillation_token, self.registers)
        tokens: list[Tensor] = [token for token in present if token is not None]
        return torch.cat(tokens, dim=1).expand(batch, -1, -1)
