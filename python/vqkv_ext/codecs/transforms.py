"""Changes of basis between vectors and codes."""

from __future__ import annotations

import mlx.core as mx

from .. import ops
from ..reference.hadamard import over_heads

_HADAMARD_FACTORS = (1, 12, 20, 28)


def has_hadamard(width: int) -> bool:
    """Whether ``width`` is ``2**k * m`` with m in {1, 12, 20, 28}. mx.hadamard_transform computes
    garbage on the CPU for other widths instead of refusing them."""
    return any(
        width % m == 0 and (width // m) & (width // m - 1) == 0 for m in _HADAMARD_FACTORS if width
    )


class SmoothedHadamard:
    """``k -> H (k / smooth)``, the key transform of VecInfer (arXiv 2510.06175, eq. 5).

    Args:
        smooth: ``[H, D]`` (per KV head) or ``[1, D]``, positive.
    """

    def __init__(self, smooth: mx.array):
        width = smooth.shape[-1]
        if not has_hadamard(width):
            raise ValueError(
                "[SmoothedHadamard] head_dim must be 2^k * m with m in {1, 12, 20, 28}, "
                f"but got {width}."
            )
        self.diagonal = smooth.astype(mx.float32)

    def forward(self, x: mx.array) -> mx.array:
        return over_heads(ops.hadamard, x, 1 / self.diagonal)

    def query(self, q: mx.array) -> mx.array:
        return over_heads(ops.hadamard, q, self.diagonal)

    def inverse(self, y: mx.array) -> mx.array:
        return over_heads(ops.hadamard, y, self.diagonal, inverse=True)

    def arrays(self) -> list[mx.array]:
        return [self.diagonal]
