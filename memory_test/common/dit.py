"""A diffusion transformer (DiT, arXiv:2212.09748) in the shape of DiT-XL/2.

Shapes: B samples, C channels of a latent image of height I and width J, patches of p x p,
T = (I / p) (J / p) tokens, E features.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHANNELS = 4
PATCH = 2


def latent_size(tokens: int) -> tuple[int, int]:
    """Height and width of the image, as square as can be, that has so many tokens."""
    rows = next(r for r in range(math.isqrt(tokens), 0, -1) if tokens % r == 0)
    return rows * PATCH, tokens // rows * PATCH


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Cosines and sines of positions ``[...]`` at ``width / 2`` frequencies: ``[..., width]``."""
    half = width // 2
    steps = torch.arange(half, dtype=torch.float32, device=positions.device)
    angles = positions.float().unsqueeze(-1) * torch.exp(-math.log(10_000) * steps / half)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def position_table(height: int, width: int, features: int) -> Tensor:
    """Fixed embedding ``[1, height * width, features]`` of the places on a grid."""
    rows = sinusoids(torch.arange(height), features // 2).unsqueeze(1).expand(-1, width, -1)
    columns = sinusoids(torch.arange(width), features // 2).unsqueeze(0).expand(height, -1, -1)
    return torch.cat([rows, columns], dim=-1).reshape(1, height * width, features)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Scale and shift ``x`` ``[B, T, E]`` by what a condition ``[B, E]`` asks for."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiTBlock(nn.Module):
    """Attention and a two-layer network, whose norms and gates follow the condition (adaLN)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """``[B, T, E]`` from ``x`` ``[B, T, E]`` and the condition ``[B, E]``."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self._attend(modulate(self.norm1(x), shift1, scale1))
        return x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B, H, T, E / H] each
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(attended.transpose(1, 2).reshape(batch, length, width))


class DiT(nn.Module):
    """Predicts the noise in an image from its step of diffusion and its class.

    Args:
        width: Number of features E.
        depth: Number of blocks.
        heads: Number of heads.
        tokens: Number of tokens T of an image, which says how large images are.
        classes: Number of classes.
    """

    def __init__(
        self, *, width: int, depth: int, heads: int, tokens: int, classes: int = 1000
    ) -> None:
        super().__init__()
        self.image_size = latent_size(tokens)
        self.classes = classes
        self.checkpointing = False
        self.width = width
        self.patches = nn.Conv2d(CHANNELS, width, kernel_size=PATCH, stride=PATCH)
        grid = tuple(side // PATCH for side in self.image_size)
        self.register_buffer("positions", position_table(*grid, width), persistent=False)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.labels = nn.Embedding(classes, width)
        self.layers = nn.ModuleList(DiTBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.head = nn.Linear(width, PATCH * PATCH * CHANNELS)

    def forward(self, images: Tensor, steps: Tensor, labels: Tensor) -> Tensor:
        """Predicted noise ``[B, C, I, J]`` from noised images, steps ``[B]`` and labels ``[B]``."""
        x = self.patches(images).flatten(2).transpose(1, 2)  # [B, T, E]
        x = x + self.positions.to(x.dtype)
        condition = self.time(sinusoids(steps, 256).to(x.dtype)) + self.labels(labels)
        for layer in self.layers:
            if self.checkpointing:
                x = checkpoint(layer, x, condition, use_reentrant=False)
            else:
                x = layer(x, condition)
        shift, scale = self.modulation(condition).chunk(2, dim=1)
        x = self.head(modulate(self.norm(x), shift, scale))
        height, width = (side // PATCH for side in self.image_size)
        x = x.view(-1, height, width, PATCH, PATCH, CHANNELS).permute(0, 5, 1, 3, 2, 4)
        return x.reshape(-1, CHANNELS, *self.image_size)
