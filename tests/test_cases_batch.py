"""Case T20: batches whose rows have different lengths; every row is what it is alone."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import cache as stock

import tiny
from test_cache import CONFIGS, SMALL, codecs, codes, feed, same, tokens
from test_cases_cache import WHICH, both, coded, exempt, greedy
from vqkv_ext import ops
from vqkv_ext.adapters.mlx_lm import make_prompt_cache
from vqkv_ext.batch_cache import BatchCompressedKVCache
from vqkv_ext.cache import CacheConfig, CompressedKVCache
from vqkv_ext.codecs import presets

pytestmark = pytest.mark.usefixtures("one_blas_thread")


def finish(batch, found=None, last=None):
    """All tokens of a batch generator by uid, and the caches it hands back; ``last`` gets the
    log-probabilities of each row's last token."""
    found, caches = found or {}, {}
    while responses := batch.next_generated():
        for r in responses:
            found.setdefault(r.uid, []).append(r.token)
            if last is not None:
                last[r.uid] = r.logprobs
            if r.finish_reason:
                caches[r.uid] = r.prompt_cache
    return found, caches


LENGTHS = {"as written": (9, 3, 6), "default": (216, 3, 140)}


@both
@pytest.mark.parametrize("preset", ["centred-2bit", "turboquant-4bit"])
@pytest.mark.parametrize("step", [5, 2048])
def test_t20_rows_are_their_single_runs(model, which, preset, step):
    """Prompts of 9, 3 and 6 ids (at the defaults longer), with and without history, in chunks."""
    config, _ = WHICH[which]
    make = lambda: make_prompt_cache(model, preset, config=config)  # noqa: E731
    prompts = [tiny.ids(n, seed=n) for n in LENGTHS[which]]
    history = [[], tiny.ids(30 if which == "as written" else 200, seed=1), []]
    single, want, likely = [], [], []
    for before, prompt in zip(history, prompts, strict=True):
        single.append(make())
        ids = mx.array(before + prompt)
        steps = [*generate_step(ids, model, max_tokens=20, prompt_cache=single[-1])]
        want.append([int(t) for t, _ in steps])
        likely.append(steps[-1][1])
    caches = [make() for _ in prompts]
    tiny.run(model, caches[1], history[1])
    assert min(coded(caches[1])) > 0
    batch = BatchGenerator(model, max_tokens=20, prefill_step_size=step)
    uids = batch.insert(prompts, caches=caches, all_tokens=[list(h) for h in history])
    found, back = finish(batch, last=(last := {}))
    assert [found[u] for u in uids] == want
    for uid, one, p in zip(uids, single, likely, strict=True):
        assert mx.abs(last[uid] - p).max() < 1e-3
        assert [c.offset for c in back[uid]] == [c.offset for c in one]
        assert coded(back[uid]) == coded(one) and min(coded(one)) > 0


def test_t20_filter_extend_extract_while_generating(model):
    """Row 1 leaves, a new one comes, row 0 is taken out and goes on alone."""
    make = lambda: make_prompt_cache(model, "centred-2bit", config=SMALL)  # noqa: E731
    prompts = [tiny.ids(n, seed=n) for n in (29, 3, 16, 21)]
    want = [greedy(model, make(), p, 30) for p in prompts]
    batch = BatchGenerator(model, max_tokens=30)
    uids = batch.insert(prompts[:3], caches=[make() for _ in range(3)])
    found = {u: [] for u in uids}
    for _ in range(6):
        for r in batch.next_generated():
            found[r.uid].append(r.token)
    batch.remove([uids[1]])
    uids += batch.insert(prompts[3:], caches=[make()])
    for _ in range(4):
        for r in batch.next_generated():
            found.setdefault(r.uid, []).append(r.token)
    cache, held = batch.extract_cache([uids[0]])[uids[0]]
    assert [c.offset for c in cache] == [len(held)] * 2 and min(coded(cache)) > 0
    n = len(held) - len(prompts[0])
    assert greedy(model, cache, [want[0][n]], 29 - n) == want[0][n + 1 :]
    found, _ = finish(batch, found)
    assert [found[uids[i]] for i in (0, 2, 3)] == [want[i] for i in (0, 2, 3)]
    assert found[uids[1]] == want[1][: len(found[uids[1]])]


def test_t20_mixed_lists(model):
    """Stock layers of the same list need padding masked, ours have none: whoever makes the mask."""
    six = tiny.llama(layers=6, tied=False)
    ours = lambda: make_prompt_cache(six, "centred-2bit", config=SMALL)  # noqa: E731

    def stock_inside():
        cache = ours()
        cache[2], cache[5] = stock.KVCache(), stock.KVCache()
        return cache

    prompts = [tiny.ids(n, seed=n) for n in (29, 3, 16)]
    for make in (lambda: exempt(six, SMALL), stock_inside):
        want = [greedy(six, make(), p, 20) for p in prompts]
        assert len(set(map(tuple, want))) == 3
        caches = [make() for _ in prompts]
        b = BatchGenerator(six, max_tokens=20, prefill_step_size=7)
        uids = b.insert(prompts, caches=caches)
        found, back = finish(b)
        assert [found[u] for u in uids] == want
        assert all(min(coded(c)) > 0 for c in back.values())
        kinds = [type(c) for c in make()]
        assert all([type(c) for c in cache] == kinds for cache in back.values())


def test_t20_stock_and_compressed_rows_are_refused(model):
    """One refusal before the first token, whichever comes first."""
    ours = lambda: make_prompt_cache(model, "centred-2bit", config=SMALL)  # noqa: E731
    for caches in ([ours(), None], [None, ours()]):
        batch = BatchGenerator(model, max_tokens=3)
        batch.insert([[1, 2, 3], [4, 5]], caches=caches)
        with pytest.raises((ValueError, AttributeError), match="batch must be|of a batch alike"):
            if caches[0] is None:  # mlx_lm takes two empty caches for equal
                tiny.run(model, caches[1], tiny.ids(3))
            finish(batch)


def ragged(rng, lengths, width=64):
    """Keys, values and queries of each row."""
    rows = [tokens(rng, n, width=width) for n in lengths]
    q = [mx.array(rng.standard_normal((1, 4, n, width)).astype(np.float32)) for n in lengths]
    return rows, q


def padded(rows, left=None):
    """Rows ``[1, H, n, D]`` in one array, padded at the right, or at the left by ``left``."""
    longest = max(x.shape[2] + (left[i] if left else 0) for i, x in enumerate(rows))
    out = []
    for i, x in enumerate(rows):
        before = left[i] if left else 0
        pads = [(0, 0), (0, 0), (before, longest - x.shape[2] - before), (0, 0)]
        out.append(mx.pad(x, pads, constant_values=7.0))
    return mx.concatenate(out)


def read(q, handles, mask="causal"):
    keys, values = handles
    return ops.attention(q, keys.packed, values.packed, scale=0.2, mask=mask)


@pytest.mark.sim
@pytest.mark.parametrize("which", CONFIGS)
@pytest.mark.parametrize("preset", ["vecinfer", "centred-2bit"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_t20_padding_is_never_coded(rng, which, preset, side):
    """Keys and values fed directly: codes are bitwise those of each row alone."""
    config, factor = CONFIGS[which]
    pair = codecs(rng)
    if preset != "vecinfer":
        pair = [presets.codec(preset, 64, s) for s in ("key", "value")]
    lengths = [43 * factor, 3, 20 * factor + 8]
    rows, q = ragged(rng, lengths)
    single = [CompressedKVCache(*pair, config) for _ in lengths]
    want = [feed(c, kv, [x.shape[2]], x) for c, kv, x in zip(single, rows, q, strict=True)]
    gap = [max(lengths) - n for n in lengths]
    left = gap if side == "left" else None
    batch = BatchCompressedKVCache(*pair, config, left or [0] * 3)
    if side == "right":
        batch.prepare(lengths=lengths, right_padding=gap)
    kv = [padded([r[i] for r in rows], left) for i in (0, 1)]
    out = feed(batch, kv, chunks := [19 * factor, 1, 24 * factor - 1], padded(q, left))
    assert sum(chunks) == max(lengths)
    batch.finalize()
    assert batch.offset.tolist() == lengths and batch.left_padding.tolist() == gap
    assert batch.size() == max(lengths) and max(batch.coded_tokens) > 0
    for b, (one, got) in enumerate(zip(single, want, strict=True)):
        first = gap[b] if left else 0
        mine = out[b : b + 1, :, first : first + lengths[b]]
        assert mx.abs(mine - got).max() < 1e-5
        assert not left or not out[b, :, :first].any()  # padding sees nothing
        assert same(codes(batch.extract(b)), codes(one))
        assert batch.extract(b).nbytes == one.nbytes
    # decode on, each row at its own position
    for _ in range(2 * config.block):
        more, q = ragged(rng, [1] * 3)
        got = read(mx.concatenate(q), batch.update_and_fetch(
            *(mx.concatenate([r[i] for r in more]) for i in (0, 1))
        ), None)  # fmt: skip
        for b, one in enumerate(single):
            assert mx.allclose(
                got[b : b + 1], read(q[b], one.update_and_fetch(*more[b]), None), atol=1e-5
            )
    assert batch.coded_tokens == [c.coded_tokens for c in single]
    assert all(same(codes(batch.extract(b)), codes(c)) for b, c in enumerate(single))


def test_t20_capacities_of_256_and_257_rows(rng):
    """One row's codes fill their arrays, another's need the next size."""
    config, pair = CacheConfig(2, 8, 1), codecs(rng)
    rows, _ = ragged(rng, [266, 267, 20])
    single = []
    for kv in rows:
        single.append(CompressedKVCache(*pair, config))
        feed(single[-1], kv, [kv[0].shape[2]])
    assert [c.coded_tokens for c in single] == [256, 257, 10]
    assert [c._bodies[0]["codes"].shape[2] for c in single] == [256, 260, 12]
    for order in ([0, 1, 2], [1, 0], [2, 1], [0, 2]):
        batch = CompressedKVCache.merge([single[i] for i in order[:1]])
        batch.extend(CompressedKVCache.merge([single[i] for i in order[1:]]))
        assert batch.coded_tokens == [single[i].coded_tokens for i in order]
        for b, i in enumerate(order):
            row = batch.extract(b)
            assert same(codes(row), codes(single[i])) and row.nbytes == single[i].nbytes
        batch.filter([len(order) - 1])
        assert batch.size() == single[order[-1]].offset
        assert same(codes(batch.extract(0)), codes(single[order[-1]]))


def test_t20_default_capacities(rng):
    """Default windows: 256 and 320 tokens coded, in arrays for 256 and 512."""
    pair = codecs(rng)
    rows, q = ragged(rng, [4 + 64 + 256, 4 + 64 + 320])
    single = [CompressedKVCache(*pair) for _ in rows]
    for c, kv in zip(single, rows, strict=True):
        feed(c, kv, [kv[0].shape[2]])
    assert [c._bodies[0]["codes"].shape[2] for c in single] == [256, 512]
    batch = single[0].merge(single)
    got = read(mx.concatenate([x[:, :, -1:] for x in q]), batch.keys_and_values(), None)
    for b, (c, x) in enumerate(zip(single, q, strict=True)):
        assert mx.allclose(got[b : b + 1], read(x[:, :, -1:], c.keys_and_values(), None), atol=1e-5)
    batch.filter([0])
    assert batch._bodies[0]["codes"].shape[2] == 256 and batch.nbytes == single[0].nbytes


def test_t20_behaves_as_the_stock_batch_cache(rng):
    """Sizes, offsets, padding and masks are those of mlx_lm's BatchKVCache, step by step."""
    pair = codecs(rng)
    lengths = [5, 0, 9]
    ours = [CompressedKVCache(*pair, SMALL) for _ in lengths]
    theirs = [stock.KVCache() for _ in lengths]
    for n, a, b in zip(lengths, ours, theirs, strict=True):
        if n:
            kv = tokens(rng, n)
            a.update_and_fetch(*kv)
            b.update_and_fetch(*kv)
    batches = [ours[0].merge(ours), stock.KVCache.merge(theirs)]

    def alike():
        a, b = batches
        assert a.size() == b.size() and a.offset.tolist() == b.offset.tolist()
        assert a.left_padding.tolist() == b.left_padding.tolist()
        for n in (1, 4):
            for window in (None, 6):
                mine = a.make_mask(n, return_array=True, window_size=window)
                assert mx.array_equal(mine, b.make_mask(n, window_size=window))
        assert a.make_mask(1) is None and a.make_mask(4) == "causal"

    def each(name, *args, **kwargs):
        return [getattr(c, name)(*args, **kwargs) for c in batches]

    alike()
    each("prepare", lengths=[2, 6, 1], right_padding=[4, 0, 5])
    each("update_and_fetch", *tokens(rng, 6, batch=3))
    each("finalize")
    alike()
    each("update_and_fetch", *tokens(rng, 1, batch=3))
    alike()
    assert each("trim", 2) == [2, 2]
    alike()
    each("filter", [2, 0])
    alike()
    for c, new in zip(batches, (ours, theirs), strict=True):
        c.extend(new[0].merge([new[0], new[2]]))
    alike()
    each("filter", mx.array([1]))
    alike()
    assert [c.extract(0).size() for c in batches] == [6, 6]
    for empty in (each("trim", 99), each("is_trimmable")):
        assert empty[0] == empty[1]


def test_t20_array_masks_count_padding(rng):
    """A mask as mlx_lm makes it, through the adapter, gives what causal does."""
    from vqkv_ext.adapters.batching import logical_mask

    pair = codecs(rng)
    single = [CompressedKVCache(*pair, SMALL) for _ in range(2)]
    for c, n in zip(single, (40, 25), strict=True):
        feed(c, tokens(rng, n), [n])
    for n in (1, 5):
        batch = single[0].merge(copy.deepcopy(single))
        kv = tokens(rng, n, batch=2)
        q = mx.array(rng.standard_normal((2, 4, n, 64)).astype(np.float32))
        mask = batch.make_mask(n, return_array=True)
        handles = batch.update_and_fetch(*kv)
        want = read(q, handles, "causal")
        for given in (mask, mx.where(mask, 0.0, -mx.inf), mx.repeat(mask, 4, 1)):
            assert mx.allclose(read(q, handles, logical_mask(given, handles[0])), want, atol=1e-5)
        # column 30 is position 30 of row 0, and 15 of row 1, which has 15 tokens less
        columns = mx.arange(40 + n)
        hiding = logical_mask(mask & (columns != 30), handles[0])
        at = mx.array([30, 15])[:, None, None, None]
        seen = columns <= mx.array([40, 25])[:, None, None, None] + mx.arange(n)[:, None]
        got = read(q, handles, hiding)
        assert mx.allclose(got, read(q, handles, seen & (columns != at)), atol=1e-5)
        assert (mx.abs(got - want).max((1, 2, 3)) > 1e-4).all()
        with pytest.raises(ValueError, match="a column for each of the"):
            logical_mask(mask[..., 1:], handles[0])


def test_t20_refusals(rng):
    pair = codecs(rng)
    a, b = (CompressedKVCache(*pair, SMALL) for _ in range(2))
    a.update_and_fetch(*tokens(rng, 30))
    other = CompressedKVCache(*codecs(np.random.default_rng(1)), SMALL)
    half = CompressedKVCache(*pair, SMALL)
    half.update_and_fetch(*tokens(rng, 3, dtype=mx.float16))
    two = CompressedKVCache(*pair, SMALL)
    two.update_and_fetch(*tokens(rng, 3, batch=2))
    for wrong, message in (
        (stock.KVCache(), "must be compressed, but got KVCache"),
        (other, "must be of codec 'vecinfer-test:"),
        (CompressedKVCache(*pair), "must have CacheConfig.*window=8.*but got.*window=64"),
        (half, "2 heads of mlx.core.float32, but got 2 of mlx.core.float16"),
        (two, "one row each, but got 2"),
    ):
        with pytest.raises(ValueError, match=r"\[BatchCompressedKVCache\].*" + message):
            a.merge([a, wrong])
    batch = a.merge([a, b])
    for call, message in (
        (lambda: batch.prepare(left_padding=[1, 0]), "must come before any token"),
        (lambda: batch.prepare(right_padding=[1]), "each of the 2 rows, but got .1."),
        (lambda: batch.prepare(right_padding=[1, 0], lengths=[-1, 3]), "lengths must be one"),
        (lambda: a.merge([]), "one or more, but got none"),
        (lambda: setattr(batch, "state", a.state), "must be that of a Batch.*got counts"),
        (lambda: batch.prepare(right_padding=[1, 0]), "a length for each of the 2 rows"),
        (lambda: batch.filter([]), "at least one row"),
        (lambda: batch.update_and_fetch(*tokens(rng, 1)), "like those held|a row for each"),
        (lambda: BatchCompressedKVCache(*pair, SMALL, []), "one number >= 0"),
        (lambda: BatchCompressedKVCache(*pair, SMALL, [-1]), "one number >= 0"),
    ):
        with pytest.raises(ValueError, match=r"\[BatchCompressedKVCache\].*" + message):
            call()
    for wrong, error in ([7], IndexError), ([True, False], TypeError), ([0.5], TypeError):
        with pytest.raises(error, match=r"\[BatchCompressedKVCache\] batch_indices must be"):
            batch.filter(mx.array(wrong))
        with pytest.raises(error, match=r"\[BatchCompressedKVCache\] idx must be"):
            batch.extract(wrong[0])
    assert batch.offset.tolist() == [30, 0]
    batch.prepare(lengths=[1, 2], right_padding=[1, 0])
    with pytest.raises(ValueError, match="extend must come after finalize"):
        batch.extend(a.merge([a]))
    fresh = BatchCompressedKVCache(*pair, SMALL, [0, 0])
    fresh.prepare(left_padding=[2, 0])
    with pytest.raises(RuntimeError, match="must follow tokens"):
        fresh.keys_and_values()
    with pytest.raises(ValueError, match="a row for each of the 2 sequences"):
        fresh.update_and_fetch(*tokens(rng, 3))
    assert fresh.offset.tolist() == [-2, 0] and fresh.empty() and fresh.nbytes == 0
