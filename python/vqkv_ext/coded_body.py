"""The coded tokens of a cache: encoding whole blocks, and arrays that grow by blocks."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from .codecs.base import Codec, CodedArrays

GROWTH = 4
"""Blocks by which the arrays grow."""

PER_BLOCK = ("centres", "centre_scales")
"""Arrays with one entry per block; the others have one per token."""

ARRAYS = ("codes", "scales", *PER_BLOCK, "pair_codes", "pair_scales")
"""Names of all arrays."""

CodedSpan = tuple[int, int, CodedArrays]
"""Arrays of the body tokens [first, last)."""


def encode_span(
    codec: Codec,
    tokens: Callable[[int, int], mx.array],
    first: int,
    due: int,
    *,
    block: int,
    use_metal_kernels: bool | None,
    frozen: Callable[[int], CodedArrays],
) -> list[CodedSpan]:
    """Codes of the body tokens [first, due).

    Args:
        codec: How.
        tokens: ``(first, last)`` to those body tokens, ``[B, H, last - first, D]``.
        first: The first token that is not coded yet.
        due: A whole number of blocks.
        block: Tokens per block.
        use_metal_kernels: See :func:`vqkv_ext.ops.native`.
        frozen: Block index to the centre coded earlier, for a block that a trim left partial.
    """
    parts: list[tuple[int, int, CodedArrays | None]] = []
    if codec.centred and first % block:
        last = min(due, first - first % block + block)
        parts.append((first, last, frozen(first // block)))
        first = last
    if first < due:
        parts.append((first, due, None))
    return [
        (
            a,
            b,
            codec.encode(
                tokens(a, b), block=block, frozen=centre, use_metal_kernels=use_metal_kernels
            ),
        )
        for a, b, centre in parts
    ]


def centre_of(body: CodedArrays, at: int, row: int | None = None) -> CodedArrays:
    """The centre of block ``at``, of one row or of all."""
    rows = slice(None) if row is None else slice(row, row + 1)
    return {n: body[n][rows, :, at : at + 1] for n in PER_BLOCK}


def store_span(
    body: CodedArrays, span: CodedSpan, *, block: int, batch: int, row: int | None = None
) -> None:
    """Put codes of all ``batch`` rows, or of one row, into the arrays of ``body``, in place."""
    first, last, coded = span
    rows = slice(None) if row is None else slice(row, row + 1)
    for name, x in coded.items():
        each = block if name in PER_BLOCK else 1
        held = body.pop(name, None)
        room = held.shape[2] if held is not None else 0
        if room * each < last:
            capacity = body_capacity(last, block) // each
            more = mx.zeros((batch, x.shape[1], capacity - room, *x.shape[3:]), x.dtype)
            held = more if held is None else mx.concatenate([held, more], axis=2)
        held[rows, :, first // each : -(-last // each)] = x
        body[name] = held


def body_capacity(tokens: int, block: int) -> int:
    """Tokens that arrays have room for when they hold ``tokens``."""
    step = GROWTH * block
    return (tokens + step - 1) // step * step


def resized(body: CodedArrays, capacity: int, block: int) -> CodedArrays:
    """The arrays with room for exactly ``capacity`` tokens."""
    return {n: fit(a, capacity // (block if n in PER_BLOCK else 1)) for n, a in body.items()}


def fit(x: mx.array, length: int) -> mx.array:
    """``x`` with axis 2 cut, or filled up with zeros, to ``length``."""
    have = x.shape[2]
    if have == length:
        return x
    if have > length:
        return mx.contiguous(x[:, :, :length])
    more = mx.zeros((*x.shape[:2], length - have, *x.shape[3:]), x.dtype)
    return mx.concatenate([x, more], axis=2)
