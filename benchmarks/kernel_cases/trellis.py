"""Trellis codes: the Viterbi algorithm over 256 states."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from vqkv_ext import ops, reference
from vqkv_ext.codecs.trellis import trained_table

from .registry import WIDTH, Calls, blocks, op, rows

STATES = 256
BLOCK = 256  # rows whose costs are held at a time


def np_path(u: np.ndarray, table: np.ndarray, bits: int) -> np.ndarray:
    """States of the cheapest paths; the 2^bits predecessors of a state are neighbours."""
    groups = STATES >> bits
    cost = np.square(u[:, :1] - table)
    choices = np.empty((u.shape[1], len(u), groups), np.uint8)
    for t in range(1, u.shape[1]):
        before = cost.reshape(len(u), groups, -1)
        choices[t] = before.argmin(-1)
        cost = np.tile(before.min(-1), STATES // groups) + np.square(u[:, t, None] - table)
    states = np.empty(u.shape, np.int64)
    states[:, -1] = cost.argmin(-1)
    for t in range(u.shape[1] - 1, 0, -1):
        group = states[:, t] % groups
        states[:, t - 1] = group << bits | choices[t, np.arange(len(u)), group]
    return states


def np_stream(states: np.ndarray, bits: int) -> np.ndarray:
    """The first state, then the bits that each further one adds."""
    added = states[:, 1:, None] >> (8 - bits + np.arange(bits)) & 1
    first = states[:, :1, None] >> np.arange(8) & 1
    both = np.concatenate([first.reshape(len(states), -1), added.reshape(len(states), -1)], axis=1)
    return np.packbits(both.astype(np.uint8), axis=-1, bitorder="little")


@op("trellis_encode, 1 bit", 1)
@op("trellis_encode, 2 bits", 2)
@op("trellis_encode, 4 bits", 4)
def trellis_encode(n: int, bits: int) -> Calls:
    """NumPy has no bfloat16 and keeps the scales in float32."""
    x = np.random.default_rng(0).standard_normal((rows(n), WIDTH), np.float32)
    a, mx_table = mx.array(x), trained_table(bits)
    table = np.array(mx_table)

    def np_viterbi() -> tuple[np.ndarray, np.ndarray]:
        norm = np.sqrt(np.einsum("ij,ij->i", x, x))
        u = x * (np.float32(np.sqrt(WIDTH)) / norm)[:, None]
        parts = [np_path(u[s], table, bits) for s in blocks(len(x), BLOCK)]
        states = np.concatenate(parts)
        levels = table[states]
        return np_stream(states, bits), norm / np.sqrt(np.einsum("ij,ij->i", levels, levels))

    def mx_viterbi() -> tuple[mx.array, mx.array]:
        return reference.trellis_encode(a, mx_table, bits)

    # another order of sums may tip the balance between two paths
    return Calls(
        lambda: ops.trellis_encode(a, mx_table, bits),
        [np_viterbi],
        [mx_viterbi],
        agree=0.98,
        tolerance=2**-7,
        reads=(a, mx_table),
    )
