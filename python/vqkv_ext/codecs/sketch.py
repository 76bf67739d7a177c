"""The random sketch of QJL (arXiv 2406.03482), and its sign codes as a table."""

from __future__ import annotations

import mlx.core as mx
import numpy as np


def make_sketch(m: int, width: int, seed: int = 0) -> mx.array:
    """A sketch ``[m, width]``, float32: blocks of ``width`` orthogonal rows of norm
    ``sqrt(width)``, directions uniform, the last block truncated.

    Orthogonal rows estimate inner products with a third of the variance of independent ones.
    Values are rounded to float16, so that machines whose QR differs in the last digits agree.

    Args:
        m: Rows.
        width: Values per vector, D.
        seed: Of the random directions.

    Raises:
        ValueError: m or width below 1.
    """
    if m < 1 or width < 1:
        raise ValueError(
            f"[make_sketch] m and width must be at least 1, but got m {m} and width {width}."
        )
    rng = np.random.default_rng(seed)
    blocks = []
    for _ in range(-(-m // width)):
        q, r = np.linalg.qr(rng.standard_normal((width, width)))
        blocks.append((q * np.where(np.diag(r) < 0, -1.0, 1.0)).T)  # the signs make it uniform
    rows = np.concatenate(blocks)[:m] * np.sqrt(width)
    return mx.array(rows.astype(np.float16).astype(np.float32))


def sign_table() -> mx.array:
    """Signs as a :class:`vqkv_ext.packed.TableCode` of stride 8: ``[1, 1, 256, 8]`` float32, row b
    having +1 where the bit of b, least significant first, is 1, and -1 where it is 0."""
    bits = np.arange(256)[:, None] >> np.arange(8) & 1
    return mx.array((2 * bits - 1).astype(np.float32)[None, None])
