"""Random rotations that need no calibration: the basis of the scalar codes."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .. import ops
from .transforms import has_hadamard


def random_signs(width: int, seed: int) -> mx.array:
    """``[width]`` float32 of +-1, the same on every machine."""
    return mx.array(np.random.default_rng(seed).choice([-1.0, 1.0], width).astype(np.float32))


class RandomHadamard:
    """``x -> H (signs * x)``: an orthonormal rotation after which channels are close to Gaussian.

    Args:
        width: D, for which a Hadamard matrix exists.
        seed: Of the signs.
    """

    def __init__(self, width: int, seed: int = 0):
        self.signs = random_signs(width, seed)
        self.diagonal = self.signs[None]

    def forward(self, x: mx.array) -> mx.array:
        return ops.hadamard(x, self.signs)

    query = forward

    def inverse(self, y: mx.array) -> mx.array:
        return ops.hadamard(y, self.signs, inverse=True)

    def arrays(self) -> list[mx.array]:
        return [self.signs]


class OverlappingHadamards:
    """A rotation for any width: Hadamard transforms of the first and of the last P channels in
    turn, P being the largest width up to D that has one. Two rounds mix all channels.

    Unlike a dense QR rotation it treats every vector alike in any batch, bit for bit, which a
    matrix product does not promise, and costs P log P.

    Args:
        width: D, at least 2.
        seed: Of the signs.
    """

    ROUNDS = 2

    def __init__(self, width: int, seed: int = 0):
        self.width = width
        self.part = next(p for p in range(width, 0, -1) if has_hadamard(p))
        n = 2 * self.ROUNDS
        self.signs = random_signs(n * self.part, seed).reshape(n, self.part)

    def _slices(self) -> list[tuple[int, int]]:
        rest = self.width - self.part
        return [(0, self.part), (rest, self.width)] * self.ROUNDS

    def forward(self, x: mx.array) -> mx.array:
        x = x.astype(mx.float32)
        for i, (a, b) in enumerate(self._slices()):
            middle = ops.hadamard(x[..., a:b], self.signs[i])
            x = mx.concatenate([x[..., :a], middle, x[..., b:]], axis=-1)
        return x

    query = forward

    def inverse(self, y: mx.array) -> mx.array:
        for i, (a, b) in reversed(list(enumerate(self._slices()))):
            middle = ops.hadamard(y[..., a:b], self.signs[i], inverse=True)
            y = mx.concatenate([y[..., :a], middle, y[..., b:]], axis=-1)
        return y

    def arrays(self) -> list[mx.array]:
        return [self.signs]


Rotation = RandomHadamard | OverlappingHadamards


def rotation(width: int, seed: int = 0) -> Rotation:
    """The rotation for a width.

    Raises:
        ValueError: A width below 2.
    """
    if width < 2:
        raise ValueError(f"[rotation] head_dim must be at least 2, but got {width}.")
    return RandomHadamard(width, seed) if has_hadamard(width) else OverlappingHadamards(width, seed)
