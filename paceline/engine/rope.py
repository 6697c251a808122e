"""Rotary position embedding (Su et al., 2021) with the linear, llama3 and yarn (Peng et al., 2023) scalings.

A pair of dimensions is one complex number here, so that a rotation is one product. Checkpoints keep the pair as
(i, i + head_dim / 2); `interleave` reorders the rows of the query and key projections once, when they are loaded, to
(2 i, 2 i + 1). Scores are dot products, which do not change when queries and keys are reordered alike.
"""

import math

import numpy as np
import torch
from torch import Tensor

from paceline.engine.config import RopeConfig


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians per position of each pair, [head_dim / 2] float32, and the factor on the rotated values."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim), _yarn_attention(rope)
    return plain, 1.0


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Long waves are divided by the factor, short ones kept, those between blended."""
    turns = rope.original_context * plain / (2 * math.pi)  # full turns within the trained context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: RopeConfig, plain: Tensor, head_dim: int) -> Tensor:
    """YaRN's ramp between interpolated and kept frequencies, over dimensions (section 3.2 of the paper)."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return plain / rope.factor * (1 - kept) + plain * kept


def _yarn_attention(rope: RopeConfig) -> float:
    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def interleave(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection (or bias, or per-head norm with heads = 1) from halves to adjacent pairs.

    [heads head_dim, ...] to a view of it, [heads, head_dim / 2, 2, ...].
    """
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2)


def rotations(inv_freq: Tensor, factor: float, positions: Tensor) -> Tensor:
    """The unit complex numbers to multiply with: [tokens, 1, head_dim / 2] complex64."""
    angles = positions[:, None].float() * inv_freq
    return torch.polar(torch.full_like(angles, factor), angles)[:, None]


class Rotations:
    """`rotations` of one model. On a CPU those of positions seen so far are kept, 256 bytes each for heads of 64."""

    KEPT = 2**14  # positions

    def __init__(self, inv_freq: Tensor, factor: float) -> None:
        self.inv_freq, self.factor = inv_freq, factor
        self.table = rotations(inv_freq, factor, torch.arange(0, device=inv_freq.device))

    def __call__(self, positions: Tensor, end: int) -> Tensor:
        """Of positions [tokens] below `end`: [tokens, 1, head_dim / 2] complex64."""
        if end > self.KEPT or positions.device.type != "cpu":
            return rotations(self.inv_freq, self.factor, positions)
        return self._until(end).index_select(0, positions)

    def up_to(self, end: int) -> np.ndarray:
        """Of the first positions, on a CPU, [at least `end`, head_dim] float32: real and imaginary parts in turn."""
        return torch.view_as_real(self._until(end)).flatten(1).numpy()

    def _until(self, end: int) -> Tensor:
        if end > len(self.table):
            self.table = rotations(self.inv_freq, self.factor, torch.arange(1 << (end - 1).bit_length()))
        return self.table


def rotate_(heads: Tensor, turns: Tensor) -> None:
    """In place: heads [tokens, n, head_dim] with adjacent pairs, times turns [tokens, 1, head_dim / 2]."""
    torch.view_as_complex(heads.unflatten(-1, (-1, 2))).mul_(turns)
