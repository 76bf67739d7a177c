"""VecInfer (arXiv 2510.06175): smoothed and rotated keys, product codes for keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from .kmeans import kmeans
from .product import ProductCodec
from .transforms import SmoothedHadamard, has_hadamard


@dataclass(frozen=True)
class VecInferSpec:
    """A size of VecInfer: one code of ``codebook_bits`` (8 or 12) for every ``key_dims`` values of
    a key and ``value_dims`` of a value; codebooks for each KV head, or for each layer only."""

    name: str
    key_dims: int
    value_dims: int
    codebook_bits: int = 8
    per_head: bool = True


PRESETS: dict[str, VecInferSpec] = {
    "vecinfer-1bit": VecInferSpec("vecinfer-1bit", 8, 8),
    # 4096 rows need the samples of all heads
    "vecinfer-1.5bit": VecInferSpec("vecinfer-1.5bit", 8, 8, codebook_bits=12, per_head=False),
    "vecinfer-2bit": VecInferSpec("vecinfer-2bit", 4, 4),
    "vecinfer-4bit": VecInferSpec("vecinfer-4bit", 2, 2),
}


def smoothing(keys: mx.array) -> mx.array:
    """``sqrt(max_t |K[t, i]|)`` per head and channel (arXiv 2510.06175, eq. 4).

    Args:
        keys: ``[H, N, D]``.

    Returns:
        ``[H, D]`` float32, positive: a channel that is zero throughout gets 1.
    """
    top = mx.abs(keys.astype(mx.float32)).max(axis=1)
    return mx.where(top > 0, mx.sqrt(top), 1.0)


def _codebook(spec: VecInferSpec, x: mx.array, dims: int, iterations: int, seed: int) -> mx.array:
    """Codebooks ``[H or 1, 1, rows, dims]`` from ``[H, N, D]``."""
    problems = x.reshape(x.shape[0] if spec.per_head else 1, -1, dims)
    return kmeans(problems, 1 << spec.codebook_bits, iterations=iterations, seed=seed)[:, None]


def fit(
    spec: VecInferSpec, keys: mx.array, values: mx.array, *, iterations: int = 30, seed: int = 0
) -> tuple[ProductCodec, ProductCodec]:
    """Fit the codecs of one layer to its keys and values.

    Args:
        spec: The size.
        keys: ``[H, N, D]`` after RoPE, N calibration tokens.
        values: ``[H, N, Dv]``.
        iterations: k-means rounds.
        seed: Of k-means.

    Raises:
        ValueError: A head dimension the method cannot take, named.
    """
    check_width(spec, keys.shape[-1], values.shape[-1])
    smooth = smoothing(keys)
    basis = SmoothedHadamard(smooth)
    rotated = basis.forward(keys[None])[0]
    key_book = _codebook(spec, rotated, spec.key_dims, iterations, seed)
    value_book = _codebook(spec, values.astype(mx.float32), spec.value_dims, iterations, seed)
    return build(spec, smooth, key_book, value_book, keys.shape[-1], values.shape[-1])


def build(
    spec: VecInferSpec,
    smooth: mx.array,
    key_codebook: mx.array,
    value_codebook: mx.array,
    key_width: int,
    value_width: int,
) -> tuple[ProductCodec, ProductCodec]:
    """The codecs of one layer from what :func:`fit` found; see there."""
    check_width(spec, key_width, value_width)
    key = ProductCodec(spec.name, key_width, key_codebook, SmoothedHadamard(smooth))
    return key, ProductCodec(spec.name, value_width, value_codebook)


def check_width(spec: VecInferSpec, key_width: int, value_width: int) -> None:
    """Refuse head dimensions the method cannot take.

    Raises:
        ValueError: Naming the dimension.
    """
    if not has_hadamard(key_width):
        raise ValueError(
            f"[{spec.name}] head_dim must be 2^k * m with m in {{1, 12, 20, 28}}, "
            f"but got {key_width}."
        )
    for what, width, dims in (
        ("key", key_width, spec.key_dims),
        ("value", value_width, spec.value_dims),
    ):
        if width % dims:
            raise ValueError(
                f"[{spec.name}] {what} head_dim must be a multiple of {dims}, but got {width}."
            )
