"""Arrays of more than 2^31 bytes, contexts of more than 2^16 tokens, and what a step allocates."""

from __future__ import annotations

import copy
import os

import mlx.core as mx
import numpy as np
import pytest

from attention_oracle import check, expected
from oracle import Case, f64, random_case, random_side
from test_cache import codecs, feed, tokens
from vqkv_ext import ops
from vqkv_ext.cache import CacheConfig, CompressedKVCache
from vqkv_ext.packed import CodedBody, Layout, PackedKV, TableCode


def _available() -> float | None:
    """Bytes of free memory, or None where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


@pytest.fixture
def much_memory():
    def need(nbytes: float = 10e9) -> None:
        free = _available()
        if free is None or free < nbytes:
            known = "an unknown amount" if free is None else f"{free / 1e9:.1f} GB"
            pytest.skip(f"needs {nbytes / 1e9:.0f} GB of free memory, but there is {known}")

    mx.clear_cache()
    yield need
    mx.clear_cache()


HEADS, ROOM, CODED, BLOCK = 9, 1 << 22, 100, 64


def _large(rng, width: int, dims: int, scaled: bool) -> tuple[CodedBody, CodedBody]:
    """A body with room for ROOM tokens, and its first BLOCK * 2 tokens alone."""
    small = random_side(rng, 1, HEADS, 2 * BLOCK, width, dims=dims, scaled=scaled, per_head=True)
    fields = {}
    for name in ("codes", "scales"):
        x = getattr(small, name)
        if x is None:
            continue
        bits = x if x.dtype == mx.uint8 else x.view(mx.uint16)
        whole = np.zeros((1, HEADS, ROOM, *x.shape[3:]), np.array(bits).dtype)
        whole[:, :, : 2 * BLOCK] = np.array(bits)
        whole = mx.array(whole)
        fields[name] = whole if x.dtype == mx.uint8 else whole.view(x.dtype)
    code = TableCode(small.code.table, small.code.stride)
    return CodedBody(code=code, **fields), small


@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.parametrize("large", ["keys", "values"])
def test_codes_beyond_2_to_the_31_bytes(rng, much_memory, large, simulated):
    """The last head's codes lie there; only a few of its tokens are seen."""
    # the simulator copies what stands in for arrays that are not used: here the keys' codes
    much_memory(22e9 if simulated and large == "keys" else 10e9)
    sizes = {"keys": (1, 8), "values": (8, 1)}[large]
    sides = [_large(rng, 64, d, scaled=i == 1) for i, d in enumerate(sizes)]
    most = max(big.codes.nbytes for big, _ in sides)
    assert most * (HEADS - 1) // HEADS >= 1 << 31
    case = random_case(
        rng, heads=HEADS, kv_heads=HEADS, coded=CODED, recent=70, queries=2, block=BLOCK
    )
    k, v = (
        PackedKV(small, side.tail, case.keys.layout)
        for (_, small), side in zip(sides, (case.keys, case.values), strict=True)
    )
    few = Case(case.q, k, v, case.lengths, case.coded, case.start)
    want = check(few)
    k, v = (
        PackedKV(big, side.tail, case.keys.layout)
        for (big, _), side in zip(sides, (case.keys, case.values), strict=True)
    )
    got = ops.attention(case.q, k, v, scale=0.125, mask="causal")
    assert np.abs(f64(got) - want).max() < 1e-5


@pytest.mark.sim
@pytest.mark.slow
def test_masks_beyond_2_to_the_31_values(rng, much_memory):
    """The rows of the last heads and queries lie there; later columns belong to no token."""
    much_memory()
    columns, queries = 1 << 22, 65
    case = random_case(rng, heads=8, kv_heads=2, coded=64, recent=140, queries=queries)
    n = case.lengths[0]
    seen = rng.random((1, 8, queries, n)) < 0.7
    whole = np.zeros((1, 8, queries, columns), bool)
    whole[..., :n] = seen
    assert whole.size >= 1 << 31
    mask = mx.array(whole)
    del whole
    got = ops.attention(case.q, case.keys, case.values, scale=0.125, mask=mask)
    want, *_ = expected(case, 0.125, mx.array(seen))
    assert np.abs(f64(got) - want).max() < 1e-5


@pytest.mark.sim
@pytest.mark.parametrize("coded", [40_000, 70_000])
def test_contexts_beyond_2_to_the_15(rng, coded, simulated):
    kw = {"heads": 1, "kv_heads": 1} if simulated else {"heads": 4, "kv_heads": 1, "queries": 3}
    spec = {"dims": 4, "scaled": True, "centred": True}
    case = random_case(rng, coded=coded, recent=80, sharp=3.0, key=spec, value={"dims": 8}, **kw)
    n = case.lengths[0]
    check(case)
    check(case, mask=mx.array(rng.random(n) < 0.5), sinks=mx.array(rng.uniform(0, 5, kw["heads"])))


# ---- a decode step ----


def _long_cache(rng) -> CompressedKVCache:
    cache = CompressedKVCache(*codecs(rng, width=128, heads=8), CacheConfig())
    for _ in range(24):
        feed(cache, tokens(rng, 2000, heads=8, width=128, dtype=mx.float16), [2000])
    # just beyond a growth of the body, so that the steps that follow have room
    while cache.offset % 256 != 68 + 64:
        feed(cache, tokens(rng, 1, heads=8, width=128, dtype=mx.float16), [1])
    mx.eval([a for c in (cache.key_codec, cache.value_codec) for a in c.arrays()])
    assert cache.coded_tokens >= 47_000 and cache.nbytes > 24e6
    return cache


def _step(cache, q, k, v) -> int:
    """Bytes allocated at the peak of one decode step beyond those before it."""
    mx.clear_cache()
    base = mx.get_active_memory()
    mx.reset_peak_memory()
    keys, values = cache.update_and_fetch(k, v)
    mx.eval(ops.attention(q, keys.packed, values.packed, scale=0.1))
    return mx.get_peak_memory() - base


def test_a_decode_step_does_not_copy_the_cache(rng, simulated):
    """Of 128 steps two code a block and move the tail: its size again, and of the block's keys and
    values a copy in 16 bits, the keys in float32, and codes. Nothing grows with the cache."""
    if simulated:
        pytest.skip("the simulator copies the buffers of every launch")
    if mx.default_device().type == mx.DeviceType.gpu:
        pytest.skip("kernels write parts for each slice, which count as well")
    cache = _long_cache(rng)
    q = mx.array(rng.standard_normal((1, 32, 1, 128)).astype(np.float16))
    k, v = tokens(rng, 1, heads=8, width=128, dtype=mx.float16)
    mx.eval(q, k, v, cache.state)
    before, size = cache.coded_tokens, cache.nbytes
    peaks = [_step(cache, q, k, v) for _ in range(128)]
    assert cache.coded_tokens == before + 128 and cache.nbytes == size
    assert sum(p > 0.001 * size for p in peaks) == 2
    moved, block = sum(t.nbytes for t in cache._tails), 64 * k.size
    assert max(peaks) < moved + 9 * block, f"{max(peaks)} bytes of {size}, step {np.argmax(peaks)}"


def test_copies_and_states_are_independent_and_cost_nothing(rng):
    """They share memory until one of them goes on, and each keeps its own tokens."""
    cache = _long_cache(rng)
    q = mx.array(rng.standard_normal((1, 32, 1, 128)).astype(np.float16))
    read = lambda c: np.array(  # noqa: E731
        ops.attention(q, *(x.packed for x in c.keys_and_values()), scale=0.1)
    )
    mx.eval(cache.state, q)
    first, base = read(cache), mx.get_active_memory()
    other, state = copy.deepcopy(cache), cache.state
    mx.eval(other.state, state)
    assert mx.get_active_memory() - base < 0.05 * cache.nbytes
    for c in (cache, other):
        feed(c, tokens(rng, 70, heads=8, width=128, dtype=mx.float16), [64, 1, 5])
    third = CompressedKVCache.from_state(state, cache.key_codec, cache.value_codec)
    assert np.array_equal(read(third), first)
    assert not np.array_equal(read(cache), first) and not np.array_equal(read(cache), read(other))
    assert cache.offset == other.offset == third.offset + 70


def test_layouts_are_per_row(rng):
    """Rows of one batch with lengths from one token to thousands."""
    batch = 3
    case = random_case(rng, batch=batch, coded=3000, recent=70, heads=4, kv_heads=2)
    rows = np.array(case.keys.layout.rows)
    rows[1] = [1, 0, 4]
    rows[2] = [450, 384, 388]
    layout = Layout(mx.array(rows), 4, 64, 64)
    k, v = (PackedKV(s.body, s.tail, layout) for s in (case.keys, case.values))
    lengths, coded, start = rows.T.tolist()
    check(Case(case.q, k, v, lengths, coded, start))
