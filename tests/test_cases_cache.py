"""The contract of mlx_lm's caches: files, speculative decoding, a start threshold, threads, bytes.
Each case with windows of a few tokens, and at the defaults with longer prompts."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import cache as stock
from mlx_lm.models import gemma3_text

import tiny
from test_cache import codecs, feed, split, tokens
from vqkv_ext.adapters.mlx_lm import disable_attention, make_prompt_cache
from vqkv_ext.adapters.serialization import load_prompt_cache, save_prompt_cache
from vqkv_ext.adapters.speculative import speculative_prompt_cache
from vqkv_ext.cache import CacheConfig, CompressedKVCache
from vqkv_ext.config import KVCacheBuilder, KVCacheConfig

HERE = Path(__file__).parent
WHICH = {"as written": (tiny.SMALL, 1), "default": (tiny.DEFAULT, 12)}
both = pytest.mark.parametrize("which", WHICH)
pytestmark = pytest.mark.usefixtures("one_blas_thread")


def greedy(model, cache, prompt, n, **kw):
    steps = generate_step(mx.array(prompt), model, max_tokens=n, prompt_cache=cache, **kw)
    return [int(token) for token, _ in steps]


def script(code: str, *args: str) -> list[str]:
    """Lines printed by a Python script in a process of its own; its exit code is not judged, as
    any model evaluated on a worker thread aborts at exit on the CPU."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, cwd=HERE
    )
    assert done.stdout, done.stderr
    return done.stdout.splitlines()


def exempt(model, config, preset="centred-2bit"):
    """First and last layer stock (case T31)."""
    middle = make_prompt_cache(model, preset, config=config)[1:-1]
    return [stock.KVCache(), *middle, stock.KVCache()]


def coded(cache) -> list[int]:
    return [c.coded_tokens for c in cache if isinstance(c, CompressedKVCache)]


# ---- T19 ----


def draft_of(model, noise: float):
    """The same model with perturbed weights."""
    draft = tiny.llama(tied=False)
    flat = tree_flatten(model.parameters())
    moved = [(k, v + noise * mx.random.normal(v.shape)) for k, v in flat]
    draft.update(tree_unflatten(moved))
    mx.eval(draft.parameters())
    return draft


@both
@pytest.mark.parametrize("preset", ["centred-2bit", "turboquant-4bit"])
def test_t19_speculative_decoding_gives_the_same_tokens(model, which, preset):
    """Prompt of 6 (at the defaults 150), 30 tokens, 3 draft tokens."""
    config, _ = WHICH[which]
    prompt = tiny.ids(6 if which == "as written" else 150)
    make = lambda m: make_prompt_cache(m, preset, config=config)  # noqa: E731
    want = greedy(model, make(model), prompt, 30)
    draft = draft_of(model, 0.02)
    target, drafting = make(model), make(draft)
    steps = speculative_generate_step(
        mx.array(prompt), model, draft, num_draft_tokens=3, max_tokens=30,
        prompt_cache=speculative_prompt_cache(target, drafting),
    )  # fmt: skip
    found = [(int(t), from_draft) for t, _, from_draft in steps]
    assert [t for t, _ in found] == want
    accepted = sum(from_draft for _, from_draft in found)
    assert 0 < accepted < 30  # some drafts were taken back
    assert min(coded(target)) > 0 and min(coded(drafting)) > 0
    assert len(set(want)) > 3
    (offset,) = {c.offset for c in target}
    assert offset - len(prompt) in (29, 30)  # the last token drafted may be in already


def test_t19_windowed_models_are_refused(model):
    args = gemma3_text.ModelArgs(
        model_type="gemma3_text", hidden_size=32, num_hidden_layers=4, intermediate_size=64,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=97,
        sliding_window=16, sliding_window_pattern=2,
    )  # fmt: skip
    windowed = stock.make_prompt_cache(gemma3_text.Model(args))
    ours = tiny.compressed(model)
    for target, draft, who in ((windowed, ours, "target"), (ours, windowed, "draft")):
        with pytest.raises(ValueError, match=f"layer 0 of the {who} has RotatingKVCache"):
            speculative_prompt_cache(target, draft)
    assert len(speculative_prompt_cache(ours, stock.make_prompt_cache(model))) == 4


# ---- prompt caches that a server keeps ----


@both
def test_a_server_reuses_prompt_caches(model, which):
    """mlx_lm's LRUPromptCache: an exact hit, a longer entry trimmed, a shorter one extended."""
    config, factor = WHICH[which]
    n = 40 * factor
    ids, more = tiny.ids(n), tiny.ids(12, seed=4)
    kept = stock.LRUPromptCache()
    cache = tiny.compressed(model, config)
    tiny.run(model, cache, ids)
    assert min(coded(cache)) > 0
    kept.insert_cache("m", ids, cache)
    assert kept.nbytes == sum(c.nbytes for c in cache)
    asked = {
        "exact": ids,
        "longer": ids[: n - 5] + more,
        "shorter": ids + more,
    }
    left = {"exact": 0, "longer": len(more), "shorter": len(more)}
    for what, prompt in asked.items():
        found, rest = kept.fetch_nearest_cache("m", prompt)
        assert len(rest) == left[what], what
        assert all(c is not d for c, d in zip(found, cache, strict=True))
        want = greedy(model, tiny.compressed(model, config), [*prompt, 1], 8)
        assert greedy(model, found, [*rest, 1], 8) == want, what
        assert {c.offset for c in cache} == {n}  # the entry itself did not change
    # an entry that extends another replaces it, as it can be trimmed
    longer, rest = kept.fetch_nearest_cache("m", ids + more)
    tiny.run(model, longer, rest)
    kept.insert_cache("m", ids + more, longer)
    assert len(kept) == 1 and kept.nbytes == sum(c.nbytes for c in longer)


# ---- T22 ----


class Counted:
    """Counts the tokens given to a codec."""

    def __init__(self, codec):
        self.codec, self.tokens = codec, []

    def __getattr__(self, name):
        return getattr(self.codec, name)

    def encode(self, x, **kwargs):
        self.tokens.append(np.array(x))
        return self.codec.encode(x, **kwargs)


@both
@pytest.mark.parametrize("step", [8, 64])
def test_t22_a_start_threshold_converts_once(rng, which, step):
    """Keys and values of 40 tokens in chunks; the threshold 16, and 24 where a block is due."""
    spans, factor = WHICH[which]
    n, step = 40 * factor, step * factor
    for start in (16 * factor, 24 * factor, 0, 1000 * factor):
        pair = [Counted(c) for c in codecs(rng)]
        config = CacheConfig(spans.sink_tokens, spans.window, spans.block, start=start)
        cache, kv = CompressedKVCache(*pair, config), tokens(rng, n)
        q = mx.array(rng.standard_normal((1, 4, n, 64)).astype(np.float32))
        at = 0
        for size in split(n, [step]):
            chunk = [x[:, :, at : at + size] for x in kv]
            got = feed(cache, chunk, [size], q[:, :, at : at + size])
            before, at = at, at + size
            due = config.coded_tokens(at) if at >= start else 0
            assert cache.coded_tokens == due and type(cache) is CompressedKVCache
            if before < start:  # as an uncompressed cache
                seen = [x[:, :, :at] for x in kv]
                want = mx.fast.scaled_dot_product_attention(
                    q[:, :, before:at], *seen, scale=0.2, mask="causal"
                )
                assert mx.abs(got - want).max() < 1e-5
            if due:  # nothing coded is kept besides, but for the block of grace
                assert cache._tail_start >= config.sink_tokens + due - config.block
                assert cache._tails[0].shape[2] == cache._tail_capacity
        for x, codec, body in zip(kv, pair, cache._bodies or ({}, {}), strict=True):
            given = np.concatenate(codec.tokens, 2) if codec.tokens else np.zeros((1, 2, 0, 64))
            first, last = config.sink_tokens, config.sink_tokens + cache.coded_tokens
            assert np.array_equal(given, np.array(x[:, :, first:last]))  # once, in order
            if cache.coded_tokens:
                direct = codec.codec.encode(x[:, :, first:last])["codes"]
                assert mx.array_equal(direct, body["codes"][:, :, : cache.coded_tokens])
        assert (cache.coded_tokens > 0) == (start <= n)


def test_t22_model_with_a_threshold(model):
    """Before it the tokens are those of a stock cache; as written, prefill steps of 8 and 64."""
    prompt = tiny.ids(40)
    config = CacheConfig(2, 8, 8, start=1000)
    want = greedy(model, stock.make_prompt_cache(model), prompt, 30)
    for step in (8, 64):
        cache = make_prompt_cache(model, "turboquant-1bit", config=config)
        assert greedy(model, cache, prompt, 30, prefill_step_size=step) == want
        assert coded(cache) == [0, 0]
        cache = make_prompt_cache(model, "turboquant-1bit", config=CacheConfig(2, 8, 8, start=16))
        greedy(model, cache, prompt, 30, prefill_step_size=step)
        assert min(coded(cache)) == config.coded_tokens(70)
    (described, _) = KVCacheBuilder.for_model(model, KVCacheConfig(window=8, block=8, start=16))
    assert described.config == CacheConfig(4, 8, 8, start=16)
    # a long time without codes: the tail grows by steps, not by every token
    cache = CompressedKVCache(*(c.key for c in tiny.calibration().layers[:1] * 2), config)
    rng, sizes = np.random.default_rng(0), set()
    for _ in range(400):
        cache.update_and_fetch(*tokens(rng, 1))
        sizes.add(cache._tails[0].shape[2])
    assert len(sizes) <= 3 and cache.offset == 400


def test_kv_bits_leaves_compressed_caches_as_they_are(model):
    """mlx_lm converts stock caches when kv_bits is given; ours offer no to_quantized."""
    prompt = tiny.ids(40)
    want = greedy(model, tiny.compressed(model), prompt, 8)
    kw = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 0}
    cache = tiny.compressed(model)
    given = list(cache)
    assert not any(hasattr(c, "to_quantized") for c in cache)
    assert greedy(model, cache, prompt, 8, **kw) == want
    assert all(a is b for a, b in zip(cache, given, strict=True)) and min(coded(cache)) > 0
    six = tiny.llama(layers=6, tied=False)
    mixed = exempt(six, tiny.SMALL)
    greedy(six, mixed, prompt, 8, **kw)
    kinds = [type(c).__name__ for c in mixed]
    assert kinds == ["QuantizedKVCache", *["CompressedKVCache"] * 4, "QuantizedKVCache"]
    assert {c.offset for c in mixed} == {48} and min(coded(mixed)) > 0


def test_max_kv_size_is_refused(model):
    with pytest.raises(ValueError, match=r"\[make_prompt_cache\] max_kv_size must be None.*512"):
        make_prompt_cache(model, "centred-4bit", max_kv_size=512)


# ---- T31 ----


@both
def test_t31_exempt_layers(tmp_path, which):
    """First and last of six layers stock: generate, trim, deepcopy, save and load."""
    config, factor = WHICH[which]
    n = 40 * factor
    model = tiny.llama(layers=6, tied=False)
    make = lambda: exempt(model, config)  # noqa: E731
    ids = tiny.ids(n)
    cache = make()
    kinds = [type(c).__name__ for c in cache]
    assert kinds == ["KVCache", *["CompressedKVCache"] * 4, "KVCache"]
    whole = tiny.run(model, cache, ids)
    for chunks in ([n - 1, 1], split(n, [7 * factor])):
        got = tiny.run(model, make(), ids, chunks)
        assert mx.abs(got - whole).max() < 1e-3
    assert min(coded(cache)) > 0 and {c.offset for c in cache} == {n}
    rest = tiny.ids(17, seed=2)
    for cut in (0, 1, 7, config.block):
        one = copy.deepcopy(cache)
        assert stock.can_trim_prompt_cache(one)
        assert [c.trim(cut) for c in one] == [cut] * 6
        fresh = make()
        tiny.run(model, fresh, ids[: n - cut])
        a, b = tiny.run(model, one, rest), tiny.run(model, fresh, rest)
        assert mx.abs(a - b).max() < 1e-3
    path = tmp_path / "cache.safetensors"
    save_prompt_cache(path, cache)
    again, _ = load_prompt_cache(path, model, like=make())
    assert [type(c).__name__ for c in again] == kinds
    assert mx.array_equal(tiny.run(model, again, rest), tiny.run(model, cache, rest))
    disable_attention(model)
