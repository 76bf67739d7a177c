"""Random attention calls: every kind of code, layout, mask and sink. See ``Spec``."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from attention_oracle import poisoned
from oracle import DTYPES, Case, random_side
from vqkv_ext.codecs import ProductCodec, presets
from vqkv_ext.codecs.base import Codec
from vqkv_ext.codecs.transforms import SmoothedHadamard, has_hadamard
from vqkv_ext.packed import CodedBody, Layout, PackedKV

TABLES = {
    "product-d4": {"dims": 4},
    "product-d2": {"dims": 2},
    "product-d8-head": {"dims": 8, "per_head": True},
    "product-d8-group": {"dims": 8, "per_group": True},
    "product-12bit": {"dims": 8, "window": 12, "stride": 12},
    "product-12bit-head": {"dims": 8, "window": 12, "stride": 12, "per_head": True},
    "3bit-scaled": {"dims": 2, "window": 6, "stride": 6, "scaled": True},
    "centred": {"dims": 4, "centred": True, "scaled": True},
    "trellis": {"dims": 1, "window": 8, "stride": 2, "scaled": True, "centred": True},
}
"""Codes of random bits, see :func:`oracle.random_side`."""

TRELLISES = {
    f"trellis-{b}-{kind}": {"dims": 1, "window": 8, "stride": b, "scaled": True, **more}
    for b in range(1, 5)
    for kind, more in (("centred", {"centred": True}), ("head", {"per_head": True}))
}
"""The same for each number of bits; keys of the presets are centred."""

FITTED = ("vecinfer-8bit", "vecinfer-12bit")
"""Product codes in a smoothed Hadamard basis."""

CODES = (*TABLES, *FITTED, *presets.PRESETS)
GROUPS = [(1, 1), (4, 1), (4, 2), (14, 2), (28, 4), (8, 1), (16, 2), (40, 8)]
WIDTHS = [64, 72, 80, 96, 112, 128, 192, 256, 512, 576]


def takes(code: str, width: int, side: str) -> bool:
    """Whether there is such a code for vectors of this width."""
    if code in FITTED:
        return has_hadamard(width)
    if side == "key" and code.startswith("qjl"):
        return int(code[4]) * width <= 576
    return side == "value" or not code.startswith("turboquant-prod") or 2 * width <= 576


@dataclass(frozen=True)
class Spec:
    """One call. Row ``b`` of the batch has ``lengths[b]`` tokens, of which ``coded[b]`` as codes
    and ``grace[b]`` of these uncompressed as well."""

    dtype: str
    heads: tuple[int, int]
    queries: int
    lengths: tuple[int, ...]
    coded: tuple[int, ...]
    grace: tuple[int, ...]
    key: str
    value: str
    key_width: int
    value_width: int
    sink_tokens: int
    window: int
    block: int
    sharp: float
    strided: bool
    seed: int

    @property
    def scale(self) -> float:
        return self.key_width**-0.5


@functools.lru_cache(64)
def _codec(code: str, width: int, heads: int, side: str, seed: int) -> Codec:
    if code not in FITTED:
        return presets.codec(code, width, side)
    rng = np.random.default_rng(seed)
    smooth = mx.array(rng.uniform(0.5, 2, (heads, width)).astype(np.float32))
    rows = 256 if code == "vecinfer-8bit" else 4096
    book = rng.standard_normal((heads if rows == 256 else 1, 1, rows, 8)).astype(np.float32)
    return ProductCodec(code, width, mx.array(book), SmoothedHadamard(smooth))


def _body(rng, spec: Spec, code: str, width: int, side: str, room: int) -> CodedBody:
    batch, heads = len(spec.lengths), spec.heads[1]
    table = (TABLES | TRELLISES).get(code)
    if table is not None:
        return random_side(rng, batch, heads, room, width, block=spec.block, **table)
    codec = _codec(code, width, heads, side, spec.seed % 4)
    if room == 0:
        return codec.body(codec.empty(batch, heads))
    x = rng.standard_normal((batch, heads, room, width)).astype(np.float32) * spec.sharp
    return codec.body(codec.encode(mx.array(x), block=spec.block))


def build(spec: Spec, *, poison: bool = True) -> Case:
    """Arrays of a call; with NaN or set bits wherever there is no token, or anything finite."""
    rng = np.random.default_rng(spec.seed)
    s, batch, kv_heads = spec.sink_tokens, len(spec.lengths), spec.heads[1]
    start = [s + c - g for c, g in zip(spec.coded, spec.grace, strict=True)]
    used = [min(n, s) + max(0, n - t) for n, t in zip(spec.lengths, start, strict=True)]
    spare = int(rng.integers(0, 9))
    body_room = -(-max(spec.coded) // spec.block) * spec.block + spec.block * int(spare > 5)
    rows = np.stack([spec.lengths, spec.coded, start], -1).astype(np.int32)
    layout = Layout(mx.array(rows), s, spec.window, spec.block)
    dtype, sides = DTYPES[spec.dtype], []
    for side, code, width in (
        ("key", spec.key, spec.key_width),
        ("value", spec.value, spec.value_width),
    ):
        t = rng.standard_normal((batch, kv_heads, max(used) + spare, width)).astype(np.float32)
        for b, n in enumerate(used):
            t[b, :, n:] = np.nan if poison else 1.0
        body = _body(rng, spec, code, width, side, body_room)
        sides.append(PackedKV(body, mx.array(t * spec.sharp).astype(dtype), layout))
    shape = (batch, spec.queries, spec.heads[0], spec.key_width)
    q = mx.array(rng.standard_normal(shape).astype(np.float32) * spec.sharp).astype(dtype)
    q = q.swapaxes(1, 2)  # as models have it
    q = q if spec.strided else mx.contiguous(q)
    case = Case(q, *sides, list(spec.lengths), list(spec.coded), start)
    return poisoned(case) if poison else case


MASKS = ("none", "causal", "bool", "own", "float32")
SHAPES = ("LN", "B1LN", "1HLN", "N", "BHLN", "B11N", "L1")


def mask_of(spec: Spec, kind: str, shape: str, more: int = 0) -> str | mx.array | None:
    """A mask of one of MASKS, in one of SHAPES if it is an array, with ``more`` columns than the
    longest row (or fewer). Some rows may be hidden altogether; values are of the query's dtype."""
    if kind in ("none", "causal"):
        return None if kind == "none" else "causal"
    rng = np.random.default_rng(spec.seed + 1)
    batch, heads, length = len(spec.lengths), spec.heads[0], spec.queries
    n = max(1, max(spec.lengths) + more)
    sizes = {"B": batch, "H": heads, "L": length, "N": n, "1": 1}
    full = tuple(sizes[c] for c in shape)
    keep = rng.random(full) < rng.choice([0.2, 0.7, 1.0])
    if keep.size and rng.random() < 0.5:
        lines = keep.reshape(-1, full[-1])
        lines[rng.integers(0, len(lines))] = False
    if kind == "bool":
        return mx.array(keep)
    never = rng.choice([-np.inf, -1e30]) if spec.dtype != "float16" else -np.inf
    m = np.where(keep, rng.standard_normal(full) * 2, never).astype(np.float32)
    if shape[0] == "B" and shape[-1] == "N":  # beyond the tokens of a row
        for b, row in enumerate(spec.lengths):
            m[b, ..., max(row, 0) :] = np.nan
    m = mx.array(m).astype(DTYPES[spec.dtype])
    # bfloat16 rounds -1e30 to a value above it
    m = mx.where(m < -9e29, mx.array(-mx.inf, m.dtype), m) if spec.dtype == "bfloat16" else m
    return m if kind == "own" else m.astype(mx.float32)


def sinks_of(spec: Spec, dtype: str = "float32") -> mx.array:
    """A logit for each query head, exact in the query's dtype; one is minus infinity."""
    rng = np.random.default_rng(spec.seed + 2)
    x = rng.uniform(-5, 5, spec.heads[0]).astype(np.float32)
    x[rng.integers(0, x.size)] = -np.inf if x.size > 1 else 0.0
    return mx.array(x).astype(DTYPES[spec.dtype]).astype(DTYPES[dtype])
