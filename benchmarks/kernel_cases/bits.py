"""Bit streams. Eight entries are gathered in, or spread over, a 64-bit word in three steps."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from vqkv_ext import ops

from .registry import Calls, blocks, compiled, op

BLOCK = 1 << 17  # entries
INTEGERS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}  # by bytes


def _masks(bits: int) -> tuple[int, int, int]:
    """Ones where 8, 4 and 2 groups of 1, 2 and 4 entries lie in a word."""
    return tuple(
        sum(((1 << (bits << t)) - 1) << ((8 << t) * i) for i in range(8 >> t)) for t in range(3)
    )


def np_pack(index: np.ndarray, bits: int) -> np.ndarray:
    """The entries, a multiple of 32 of them, as a bit stream."""
    if bits == 8:
        return index
    _, pairs, quads = _masks(bits)
    v = index.view(np.uint64)
    v = v | v >> np.uint64(8 - bits)
    v &= np.uint64(pairs)
    v |= v >> np.uint64(16 - 2 * bits)
    v &= np.uint64(quads)
    v |= v >> np.uint64(32 - 4 * bits)
    if bits in INTEGERS:
        return v.astype(INTEGERS[bits]).view(np.uint8)
    v = (v.astype(np.uint32) & np.uint32(0xFFFFFF)).reshape(-1, 4)  # 4 words of 24 bits in 3 of 32
    out = np.empty((len(v), 3), np.uint32)
    for t in range(3):
        out[:, t] = v[:, t] >> np.uint32(8 * t) | v[:, t + 1] << np.uint32(24 - 8 * t)
    return out.view(np.uint8).reshape(-1)


def mx_pack(index: mx.array, bits: int) -> mx.array:
    """Like `np_pack`."""
    if bits == 8:
        return index
    _, pairs, quads = _masks(bits)
    word = lambda k: mx.array(k, mx.uint64)  # noqa: E731
    v = index.view(mx.uint64)
    v = (v | v >> word(8 - bits)) & word(pairs)
    v = (v | v >> word(16 - 2 * bits)) & word(quads)
    v = v | v >> word(32 - 4 * bits)
    if bits in INTEGERS:
        return v.astype(getattr(mx, INTEGERS[bits])).view(mx.uint8)
    half = lambda k: mx.array(k, mx.uint32)  # noqa: E731
    v = (v.astype(mx.uint32) & half(0xFFFFFF)).reshape(-1, 4)
    out = [v[:, t] >> half(8 * t) | v[:, t + 1] << half(24 - 8 * t) for t in range(3)]
    return mx.stack(out, axis=-1).view(mx.uint8).reshape(-1)


@op("pack_bits, 1 bit", 1)
@op("pack_bits, 2 bits", 2)
@op("pack_bits, 3 bits", 3)
@op("pack_bits, 4 bits", 4)
def pack_bits(n: int, bits: int) -> Calls:
    n = -(-n // 32) * 32
    i = np.random.default_rng(0).integers(0, 1 << bits, n, np.uint8)
    a = mx.array(i)

    def np_packbits() -> np.ndarray:
        return np.packbits(i, bitorder="little")

    def np_words() -> np.ndarray:
        return np_pack(i, bits)

    def np_words_in_blocks() -> np.ndarray:
        out = np.empty(n * bits // 8, np.uint8)
        for s in blocks(n, BLOCK):
            out[s.start * bits // 8 : s.stop * bits // 8] = np_pack(i[s], bits)
        return out

    def mx_words() -> mx.array:
        return mx_pack(a, bits)

    return Calls(
        lambda: ops.pack_bits(a, bits),
        [np_words, np_words_in_blocks, *([np_packbits] if bits == 1 else [])],
        [mx_words, compiled(mx_words)],
        reads=(a,),
    )


@op("unpack_bits, 2 bits", 2)
@op("unpack_bits, 3 bits", 3)
def unpack_bits(n: int, bits: int) -> Calls:
    n = -(-n // 32) * 32
    p = np.random.default_rng(0).integers(0, 256, n * bits // 8, np.uint8)
    a = mx.array(p)
    singles, pairs, quads = _masks(bits)

    def np_spread(stream: np.ndarray, out: np.ndarray) -> None:
        if bits in INTEGERS:
            v = stream.view(INTEGERS[bits]).astype(np.uint64)
        else:
            q = stream.view(np.uint32).reshape(-1, 3)
            v = np.empty((len(q), 4), np.uint64)
            v[:, 0] = q[:, 0]
            v[:, 1] = q[:, 0] >> np.uint32(24) | q[:, 1] << np.uint32(8)
            v[:, 2] = q[:, 1] >> np.uint32(16) | q[:, 2] << np.uint32(16)
            v[:, 3] = q[:, 2] >> np.uint32(8)
            v = v.reshape(-1)
            v &= np.uint64(0xFFFFFF)
        v |= v << np.uint64(32 - 4 * bits)
        v &= np.uint64(quads)
        v |= v << np.uint64(16 - 2 * bits)
        v &= np.uint64(pairs)
        v |= v << np.uint64(8 - bits)
        np.bitwise_and(v, np.uint64(singles), out=out)

    def np_words_in_blocks() -> np.ndarray:
        out = np.empty(n // 8, np.uint64)
        for s in blocks(n, BLOCK):
            np_spread(p[s.start * bits // 8 : s.stop * bits // 8], out[s.start // 8 : s.stop // 8])
        return out.view(np.uint8)

    def np_table() -> np.ndarray:
        """Entries by pairs of bytes."""
        return table[p.view(np.uint16)].view(np.uint8)

    if bits == 2:
        table = np.empty(1 << 16, np.uint64)
        np_spread(np.arange(1 << 16, dtype=np.uint16).view(np.uint8), table)

    def mx_words() -> mx.array:
        word = lambda k: mx.array(k, mx.uint64)  # noqa: E731
        half = lambda k: mx.array(k, mx.uint32)  # noqa: E731
        if bits in INTEGERS:
            v = a.view(getattr(mx, INTEGERS[bits])).astype(mx.uint64)
        else:
            q = a.view(mx.uint32).reshape(-1, 3)
            quarters = [
                q[:, 0],
                q[:, 0] >> half(24) | q[:, 1] << half(8),
                q[:, 1] >> half(16) | q[:, 2] << half(16),
                q[:, 2] >> half(8),
            ]
            v = (mx.stack(quarters, axis=-1).reshape(-1) & half(0xFFFFFF)).astype(mx.uint64)
        v = (v | v << word(32 - 4 * bits)) & word(quads)
        v = (v | v << word(16 - 2 * bits)) & word(pairs)
        v = (v | v << word(8 - bits)) & word(singles)
        return v.view(mx.uint8)

    return Calls(
        lambda: ops.unpack_bits(a, bits, n),
        [np_words_in_blocks, *([np_table] if bits == 2 else [])],
        [mx_words, compiled(mx_words)],
        reads=(a,),
    )
