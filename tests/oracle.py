"""The ops in NumPy and float64, written independently of the package."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from vqkv_ext.packed import CodedBody, Layout, PackedKV, TableCode

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
EPS = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def f64(a: mx.array) -> np.ndarray:
    return np.array(a.astype(mx.float32)).astype(np.float64)


def nearest(x: np.ndarray, book: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distances [..., G, K] to every row and the index of the smallest; book [.., G or 1, K, d]."""
    d = book.shape[-1]
    v = x.reshape(*x.shape[:-1], -1, 1, d)
    if book.ndim == 4:
        book = book[:, None]
    distance = ((v - book) ** 2).sum(-1)
    return distance, distance.argmin(-1)


def unpack(codes: np.ndarray, window: int, stride: int, entries: int) -> np.ndarray:
    """Indices from a bit stream, bit by bit."""
    bits = np.unpackbits(codes, axis=-1, bitorder="little").astype(np.int64)
    at = stride * np.arange(entries)[:, None] + np.arange(window)
    return (bits[..., at] << np.arange(window)).sum(-1)


@dataclass
class Case:
    """A random attention call and everything needed to recompute it."""

    q: mx.array
    keys: PackedKV
    values: PackedKV
    lengths: list[int]
    coded: list[int]
    start: list[int]


def random_side(
    rng: np.random.Generator,
    batch: int,
    heads: int,
    body: int,
    width: int,
    *,
    dims: int,
    window: int = 8,
    stride: int = 8,
    per_head: bool = False,
    per_group: bool = False,
    scaled: bool = False,
    centred: bool = False,
    block: int = 64,
) -> CodedBody:
    entries = width // dims
    nbytes = ((entries - 1) * stride + window + 7) // 8
    codes = rng.integers(0, 256, (batch, heads, body, nbytes)).astype(np.uint8)
    shape = (heads if per_head else 1, entries if per_group else 1, 1 << window, dims)
    table = rng.standard_normal(shape).astype(np.float16).astype(np.float32)
    scales = centres = centre_scales = None
    if scaled:
        scales = mx.array(rng.uniform(0.5, 2, (batch, heads, body))).astype(mx.bfloat16)
    if centred:
        blocks = -(-body // block)
        centres = mx.array(rng.integers(-127, 128, (batch, heads, blocks, width)).astype(np.int8))
        centre_scales = mx.array(rng.uniform(0, 0.02, (batch, heads, blocks))).astype(mx.bfloat16)
    code = TableCode(mx.array(table), stride)
    return CodedBody(mx.array(codes), code, scales, centres, centre_scales)


def random_case(
    rng: np.random.Generator,
    *,
    dtype: str = "float32",
    batch: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    queries: int = 1,
    coded: int = 128,
    recent: int = 70,
    grace: int = 0,
    key_width: int = 64,
    value_width: int = 64,
    key: dict | None = None,
    value: dict | None = None,
    sink_tokens: int = 4,
    window: int = 64,
    block: int = 64,
    ragged: bool = False,
    spare: int = 5,
    sharp: float = 1.0,
) -> Case:
    """`coded` tokens as codes, `recent` tokens after them uncompressed, `grace` of them both; NaN
    in every tail slot that holds no token."""
    body_room = -(-max(coded, 0) // block) * block
    key = {"dims": 4} | (key or {})
    value = {"dims": 4} | (value or {})
    sides = [
        random_side(rng, batch, kv_heads, body_room, w, block=block, **kw)
        for w, kw in ((key_width, key), (value_width, value))
    ]
    lengths, coded_rows, start_rows = [], [], []
    for b in range(batch):
        c = max(0, coded - 16 * b) if ragged else coded
        lengths.append(sink_tokens + c + recent - (3 * b if ragged else 0))
        coded_rows.append(c)
        start_rows.append(sink_tokens + max(0, c - grace))
    room = sink_tokens + recent + grace + spare
    tails = []
    for w in (key_width, value_width):
        t = rng.standard_normal((batch, kv_heads, room, w)) * sharp
        for b in range(batch):
            used = sink_tokens + lengths[b] - start_rows[b]
            t[b, :, used:] = np.nan
        tails.append(mx.array(t.astype(np.float32)).astype(DTYPES[dtype]))
    q = rng.standard_normal((batch, heads, queries, key_width)).astype(np.float32) * sharp
    rows = mx.array(np.stack([lengths, coded_rows, start_rows], -1).astype(np.int32))
    layout = Layout(rows, sink_tokens, window, block)
    return Case(
        mx.array(q).astype(DTYPES[dtype]),
        PackedKV(sides[0], tails[0], layout),
        PackedKV(sides[1], tails[1], layout),
        lengths,
        coded_rows,
        start_rows,
    )


def decode64(body: CodedBody, width: int, block: int) -> np.ndarray:
    """[B, H, S, D] in float64."""
    code = body.code
    table = f64(code.table)
    heads, groups = table.shape[:2]
    entries = width // code.dims
    index = unpack(np.array(body.codes), code.window, code.stride, entries)
    h = np.arange(index.shape[1])[:, None, None] if heads > 1 else 0
    g = np.arange(entries) if groups > 1 else 0
    x = table[h, g, index].reshape(*index.shape[:3], width)
    if body.scales is not None:
        x = x * f64(body.scales)[..., None]
    if body.centres is not None:
        c = np.array(body.centres).astype(np.float64) * f64(body.centre_scales)[..., None]
        x = x + np.repeat(c, block, axis=2)[:, :, : x.shape[2]]
    return x


def visible_vectors(
    case: Case, b: int, seen: int, body_keys: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [Hkv, n, D] that a query of row b seeing `seen` tokens attends to, in order
    of position, straight from the definition of the layout."""
    layout = case.keys.layout
    s, w, block = layout.sink_tokens, layout.window, layout.block
    coded, start = case.coded[b], case.start[b]
    limit = block * max(0, math.floor((seen - s - w) / block))
    boundary = s + min(coded, max(start - s, limit))
    out = []
    for packed in (case.keys, case.values):
        width = packed.tail.shape[-1]
        if packed is case.keys and body_keys is not None:
            body = body_keys[b]
        else:
            body = decode64(packed.body, width, block)[b]
        tail = f64(packed.tail)[b]
        rows = []
        for position in range(seen):
            if position < s:
                rows.append(tail[:, position])
            elif position < boundary:
                rows.append(body[:, position - s])
            else:
                rows.append(tail[:, s + position - start])
        out.append(np.stack(rows, 1) if rows else np.zeros((tail.shape[0], 0, width)))
    return out[0], out[1]


def attention64(
    case: Case, scale: float, causal: bool, body_keys: np.ndarray | None = None
) -> np.ndarray:
    """Dense softmax attention in float64 over the decoded tokens, [B, Hq, L, Dv]; `body_keys`
    [B, Hkv, S, D] stand for the decoded keys."""
    q = f64(case.q)
    batch, heads, queries, _ = q.shape
    kv_heads = case.keys.tail.shape[1]
    out = np.zeros((*q.shape[:3], case.values.tail.shape[-1]))
    for b in range(batch):
        for i in range(queries):
            seen = case.lengths[b] - queries + i + 1 if causal else case.lengths[b]
            if seen <= 0:
                continue
            k, v = visible_vectors(case, b, seen, body_keys)
            for h in range(heads):
                kh = h // (heads // kv_heads)
                logits = scale * k[kh] @ q[b, h, i]
                e = np.exp(logits - logits.max())
                out[b, h, i] = e @ v[kh] / e.sum()
    return out


def dense_error(case: Case, scale: float, causal: bool, want: np.ndarray) -> float:
    """Largest error of mx.fast attention over the decoded vectors in the query's dtype."""
    worst = 0.0
    queries = case.q.shape[2]
    for b in range(case.q.shape[0]):
        for i in range(queries):
            seen = case.lengths[b] - queries + i + 1 if causal else case.lengths[b]
            if seen <= 0:
                continue
            k, v = (
                mx.array(x[None].astype(np.float32)).astype(case.q.dtype)
                for x in visible_vectors(case, b, seen)
            )
            got = mx.fast.scaled_dot_product_attention(
                case.q[b : b + 1, :, i : i + 1], k, v, scale=scale, stream=mx.cpu
            )
            worst = max(worst, float(np.abs(f64(got)[0, :, 0] - want[b, :, i]).max()))
    return worst
