"""Changes of basis between vectors and codes."""

from __future__ import annotations

import math

import mlx.core as mx

_HADAMARD_FACTORS = (1, 12, 20, 28)


def has_hadamard(width: int) -> bool:
    """Whether ``width`` is ``2**k * m`` with m in {1, 12, 20, 28}. mx.hadamard_transform computes
    garbage on the CPU for other widths instead of refusing them."""
    return any(
        width % m == 0 and (width // m) & (width // m - 1) == 0 for m in _HADAMARD_FACTORS if width
    )


def hadamard(x: mx.array) -> mx.array:
    """Orthonormal Hadamard transform of the last axis in float32. Only for powers of two is the
    matrix symmetric: see :func:`inverse_hadamard`."""
    return mx.hadamard_transform(x.astype(mx.float32), scale=1 / math.sqrt(x.shape[-1]))


def inverse_hadamard(y: mx.array) -> mx.array:
    """The transpose of :func:`hadamard`, float32."""
    width = y.shape[-1]
    if width & (width - 1) == 0:
        return hadamard(y)
    matrix = hadamard(mx.eye(width))  # rows are images of the unit vectors: y = x @ matrix
    return y.astype(mx.float32) @ matrix.T


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
        self.smooth = self.diagonal[:, None]  # [H or 1, 1, D]

    def forward(self, x: mx.array) -> mx.array:
        return hadamard(x.astype(mx.float32) / self.smooth)

    def query(self, q: mx.array) -> mx.array:
        heads = self.smooth.shape[0]
        grouped = q.astype(mx.float32).reshape(q.shape[0], heads, -1, q.shape[-1])
        return hadamard((grouped * self.smooth).reshape(q.shape))

    def inverse(self, y: mx.array) -> mx.array:
        return inverse_hadamard(y) * self.smooth

    def arrays(self) -> list[mx.array]:
        return [self.smooth]
