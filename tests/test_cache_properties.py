"""Random sequences of everything a cache can be asked, against lists of tokens.

Keys and values depend on the token alone, and the codec codes each token by itself: so what a
cache must decode is known for every token, bitwise, whatever happened to it.
"""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mlx_lm.models import cache as stock

from test_cache import SMALL, codes, same
from vqkv_ext import ops
from vqkv_ext.adapters.serialization import register
from vqkv_ext.cache import CompressedKVCache
from vqkv_ext.codecs import presets

WIDTH, HEADS, VOCABULARY = 16, 2, 50
CODECS = [presets.codec("turboquant-2bit", WIDTH, side) for side in ("key", "value")]
_rng = np.random.default_rng(3)
TABLES = [
    mx.array(_rng.standard_normal((VOCABULARY, HEADS, WIDTH)).astype(np.float32)) for _ in "kv"
]
QUERY = mx.array(_rng.standard_normal((1, HEADS, 1, WIDTH)).astype(np.float32))
tokens = st.builds(
    lambda n, seed: np.random.default_rng(seed).integers(0, VOCABULARY, n).tolist(),
    st.integers(1, 40),
    st.integers(0, 999),
)


def vectors(ids: list[list[int]]) -> list[mx.array]:
    """Keys and values ``[B, H, L, D]`` of rows of equal length."""
    return [t[mx.array(ids)].swapaxes(1, 2) for t in TABLES]


CODED = [
    np.array(codec.decode(codec.encode(x)))[0]
    for codec, x in zip(CODECS, vectors([list(range(VOCABULARY))]), strict=True)
]


def fresh() -> CompressedKVCache:
    return CompressedKVCache(*CODECS, SMALL)


@dataclass
class Row:
    """What a cache should hold. ``exact``: no trim went deeper than the block of grace."""

    ids: list[int] = field(default_factory=list)
    highest: int = 0
    exact: bool = True

    def append(self, ids: list[int]) -> None:
        self.ids += ids
        self.highest = max(self.highest, len(self.ids))

    def trim(self, n: int) -> None:
        del self.ids[len(self.ids) - n :]
        self.exact &= self.highest - len(self.ids) <= SMALL.block
        if not self.ids:  # nothing is left of what was coded
            self.highest, self.exact = 0, True

    def check(self, cache: CompressedKVCache) -> None:
        assert cache.offset == cache.size() == len(self.ids)
        coded, sinks = cache.coded_tokens, SMALL.sink_tokens
        due = SMALL.coded_tokens(len(self.ids))
        assert coded == due if self.exact else due <= coded <= max(0, len(self.ids) - sinks)
        if not self.ids:
            return
        assert cache.nbytes == sum(a.nbytes for a in cache._arrays())
        at = cache._tail_start
        assert at >= sinks + coded - SMALL.block
        for i, (table, decoded, codec) in enumerate(zip(TABLES, CODED, CODECS, strict=True)):
            raw = np.array(table)
            tail = np.array(cache._tails[i])[0]
            recent = self.ids[max(sinks, sinks + coded) :]
            assert np.array_equal(tail[:, : min(sinks, len(self.ids))],
                                  raw[self.ids[:sinks]].swapaxes(0, 1))  # fmt: skip
            if recent:
                first = sinks + coded - at + sinks
                assert np.array_equal(tail[:, first : first + len(recent)],
                                      raw[recent].swapaxes(0, 1))  # fmt: skip
            if coded:
                body = {n: a[:, :, :coded] for n, a in cache._bodies[i].items()}
                got = np.array(codec.decode(body, SMALL.block))[0]
                assert np.array_equal(got, decoded[:, self.ids[sinks : sinks + coded]])

    def clone(self) -> Row:
        return Row(list(self.ids), self.highest, self.exact)


def attend(cache, rows=1) -> mx.array:
    keys, values = cache.keys_and_values()
    q = mx.broadcast_to(QUERY, (rows, *QUERY.shape[1:]))
    return ops.attention(q, keys.packed, values.packed, scale=0.3)


def reload(cache):
    register()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "cache.safetensors")
        stock.save_prompt_cache(path, [cache])
        (again,) = stock.load_prompt_cache(path)
        mx.eval(again.state)
    return again


class Caches(RuleBasedStateMachine):
    """Some caches of one row, and one batch."""

    @initialize()
    def begin(self):
        self.single: list[tuple[CompressedKVCache, Row]] = []
        for n in (0, 21, 34):
            self.single.append((fresh(), Row()))
            if n:
                self.append(-1, list(range(n)))
        self.merge()

    def one(self, at: int) -> tuple[CompressedKVCache, Row]:
        return self.single[at % len(self.single)]

    @rule(at=st.integers(0, 9), ids=tokens)
    def append(self, at, ids):
        cache, row = self.one(at)
        cache.update_and_fetch(*vectors([ids]))
        row.append(ids)

    @rule(at=st.integers(0, 9), n=st.one_of(st.integers(-2, 9), st.integers(0, 60)))
    def trim(self, at, n):
        cache, row = self.one(at)
        want = max(0, min(n, len(row.ids)))
        assert cache.trim(n) == want
        row.trim(want)

    @rule(at=st.integers(0, 9), ids=tokens)
    def copy_and_go_on(self, at, ids):
        cache, row = self.one(at)
        self.single = [*self.single[-3:], (copy.deepcopy(cache), row.clone())]
        cache.update_and_fetch(*vectors([ids]))
        row.append(ids)

    @rule(at=st.integers(0, 9))
    def save_and_load(self, at):
        at %= len(self.single)
        cache, row = self.single[at]
        self.single[at] = (reload(cache), row)

    @rule()
    def another(self):
        self.single = [*self.single[-3:], (fresh(), Row())]

    @rule()
    def merge(self):
        caches = [cache for cache, _ in self.single]
        self.batch = caches[0].merge(caches)
        self.rows = [row.clone() for _, row in self.single]

    @rule(chunks=st.data())
    def append_rows(self, chunks):
        """Rows of different lengths, in chunks, padded at the right."""
        new = [chunks.draw(tokens) for _ in self.rows]
        lengths = [len(x) for x in new]
        padding = [max(lengths) - n for n in lengths]
        padded = vectors([x + [0] * n for x, n in zip(new, padding, strict=True)])
        self.batch.prepare(lengths=lengths, right_padding=padding)
        step = chunks.draw(st.integers(1, 20))
        for at in range(0, max(lengths), step):
            self.batch.update_and_fetch(*(x[:, :, at : at + step] for x in padded))
        self.batch.finalize()
        for row, ids in zip(self.rows, new, strict=True):
            row.append(ids)

    @rule(n=st.integers(1, 12), token=st.integers(0, 20))
    def decode(self, n, token):
        for _ in range(n):
            ids = [[token + b] for b in range(len(self.rows))]
            self.batch.update_and_fetch(*vectors(ids))
            for row, i in zip(self.rows, ids, strict=True):
                row.append(i)

    @rule(n=st.integers(0, 12))
    def trim_rows(self, n):
        n = min(n, *(len(row.ids) for row in self.rows), self.batch.size())
        assert self.batch.trim(n) == n
        for row in self.rows:
            row.trim(n)

    @rule(keep=st.lists(st.integers(0, 9), min_size=1, max_size=4))
    def filter(self, keep):
        keep = [i % len(self.rows) for i in keep]
        self.batch.filter(keep)
        self.rows = [self.rows[i].clone() for i in keep]

    @precondition(lambda self: len(self.rows) < 6)
    @rule(at=st.integers(0, 9))
    def extend(self, at):
        cache, row = self.one(at)
        self.batch.extend(cache.merge([cache]))
        self.rows.append(row.clone())

    @rule(at=st.integers(0, 9))
    def extract(self, at):
        at %= len(self.rows)
        row = self.rows[at].clone()
        self.single = [*self.single[-3:], (self.batch.extract(at), row)]

    @rule(how=st.sampled_from([copy.deepcopy, reload]))
    def copy_batch(self, how):
        self.batch = how(self.batch)

    @invariant()
    def caches_hold_what_they_should(self):
        for cache, row in self.single:
            row.check(cache)

    @invariant()
    def rows_hold_what_they_should(self):
        assert self.batch.offset.tolist() == [len(row.ids) for row in self.rows]
        assert self.batch.nbytes == sum(a.nbytes for a in self.batch._arrays())
        for b, row in enumerate(self.rows):
            row.check(self.batch.extract(b))

    def teardown(self):
        """A cache that no deep trim touched equals one fed the kept tokens; and a row of the batch
        attends as a cache of its own."""
        for cache, row in self.single:
            if not row.ids:
                continue
            if row.exact:
                new = fresh()
                new.update_and_fetch(*vectors([row.ids]))
                if cache.coded_tokens:  # arrays without tokens may be left of what was trimmed
                    assert same(codes(cache), codes(new))
                assert mx.allclose(attend(cache), attend(new), atol=1e-5)
        if not self.batch.empty():
            out = attend(self.batch, len(self.rows))
            for b, row in enumerate(self.rows):
                if row.ids:
                    assert mx.allclose(out[b : b + 1], attend(self.batch.extract(b)), atol=1e-5)
                else:
                    assert not out[b].any()


TestCaches = Caches.TestCase
TestCaches.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
