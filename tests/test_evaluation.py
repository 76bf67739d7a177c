"""The quality protocol on a tiny random llama, where every value can be recomputed."""

import json
import math

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("mlx_lm")

from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from vqkv_ext import evaluation
from vqkv_ext.evaluation import cache_bytes, compare, evaluate, stock_cache


@pytest.fixture(scope="module")
def model():
    mx.random.seed(5)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            vocab_size=97,
            rms_norm_eps=1e-5,
        )
    )
    # Fresh weights predict almost uniformly; larger ones make mistakes in the cache visible.
    weights = tree_flatten(model.parameters())
    model.load_weights([(k, v * 6 if v.ndim == 2 else v) for k, v in weights])
    model.eval()
    return model


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(1).integers(0, 97, 300).tolist()


def log_probabilities(model, ids, chunk, make):
    """(N, 97) in float64, with nothing shared with the module under test."""
    cache, rows = make(), []
    for start in range(0, len(ids), chunk):
        logits = model(mx.array([ids[start : start + chunk]]), cache=cache)[0]
        rows.append(np.array(logits, dtype=np.float64))
    logits = np.concatenate(rows)
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def test_identical_caches_agree_exactly(model, ids):
    quality = evaluate(model, ids, lambda: stock_cache(model))
    assert quality.kl == quality.kl_late == quality.kl_max == 0.0
    assert quality.top1 == 1.0
    assert quality.ppl == quality.ppl_reference
    assert quality.delta_ppl == 0.0
    assert quality.positions == 300
    assert quality.cache_bytes == quality.reference_bytes > 0


@pytest.mark.parametrize("chunk", [1, 7, 64, 299, 1000])
def test_chunking_does_not_change_perplexity(model, ids, chunk):
    whole = evaluate(model, ids, lambda: stock_cache(model), chunk=len(ids))
    parts = evaluate(model, ids, lambda: stock_cache(model), chunk=chunk)
    assert parts.ppl == pytest.approx(whole.ppl, rel=1e-4)
    assert parts.positions == whole.positions


@pytest.mark.parametrize("skip", [0, 1, 64, 100, 298])
@pytest.mark.parametrize("bits", [2, 4])
def test_matches_a_plain_computation(model, ids, bits, skip):
    def make():
        return stock_cache(model, bits)

    quality = evaluate(model, ids, make, skip=skip)
    p = log_probabilities(model, ids, 64, lambda: stock_cache(model))
    q = log_probabilities(model, ids, 64, make)
    kl = (np.exp(p) * (p - q)).sum(-1)
    following = np.arange(skip, len(ids) - 1)

    def perplexity(logp):
        return math.exp(-logp[following, np.array(ids)[following + 1]].mean())

    assert quality.kl == pytest.approx(kl[skip:].mean(), rel=1e-3, abs=1e-6)
    assert quality.kl_late == pytest.approx(kl[max(skip, 256) :].mean(), rel=1e-3, abs=1e-6)
    assert quality.kl_max == pytest.approx(kl[skip:].max(), rel=1e-3, abs=1e-6)
    assert quality.top1 == pytest.approx((p.argmax(-1) == q.argmax(-1))[skip:].mean())
    assert quality.ppl == pytest.approx(perplexity(q), rel=1e-4)
    assert quality.ppl_reference == pytest.approx(perplexity(p), rel=1e-4)
    change = 100 * (perplexity(q) / perplexity(p) - 1)
    assert quality.delta_ppl == pytest.approx(change, rel=1e-3, abs=0.05)
    assert quality.positions == len(ids) - skip


def test_several_caches_share_one_reference(model, ids):
    made = []

    def reference():
        made.append(1)
        return stock_cache(model)

    seen = []
    names = {f"{b} bits": (lambda b=b: stock_cache(model, b)) for b in (8, 4, 2)}
    result = compare(
        model, mx.array(ids), names, reference=reference, progress=lambda *at: seen.append(at)
    )
    assert list(result) == list(names)
    assert len(made) == 1
    assert seen == [(64, 300), (128, 300), (192, 300), (256, 300), (300, 300)]
    assert 0 < result["8 bits"].kl < result["4 bits"].kl < result["2 bits"].kl
    assert result["8 bits"].cache_bytes > result["4 bits"].cache_bytes > 0
    for bits in (8, 4, 2):
        alone = evaluate(model, ids, lambda b=bits: stock_cache(model, b))
        assert alone.kl == result[f"{bits} bits"].kl


def test_reference_may_be_any_cache(model, ids):
    quality = evaluate(
        model, ids, lambda: stock_cache(model, 4), reference=lambda: stock_cache(model, 4)
    )
    assert quality.kl == 0.0


def test_short_text_has_no_late_positions(model, ids):
    quality = evaluate(model, ids[:256], lambda: stock_cache(model, 4))
    assert math.isnan(quality.kl_late)
    assert quality.to_dict()["kl_late"] is None
    assert evaluate(model, ids[:257], lambda: stock_cache(model, 4)).kl_late > 0
    assert evaluate(model, ids[:2], lambda: stock_cache(model)).positions == 2


def test_to_dict_is_json(model, ids):
    values = evaluate(model, ids, lambda: stock_cache(model, 8)).to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert {"kl", "top1", "ppl", "delta_ppl", "cache_bytes", "seconds"} <= set(values)


def test_stock_cache_kinds(model):
    assert [type(c) for c in stock_cache(model)] == [KVCache, KVCache]
    quantised = stock_cache(model, 4, group_size=32)
    assert [type(c) for c in quantised] == [QuantizedKVCache] * 2
    assert {(c.bits, c.group_size) for c in quantised} == {(4, 32)}
    assert cache_bytes(stock_cache(model)) == 0


@pytest.mark.parametrize("bits", [0, 1, 7, 16])
def test_stock_cache_rejects_bits(model, bits):
    with pytest.raises(ValueError, match=rf"\[stock_cache\] kv_bits must .* but got {bits}"):
        stock_cache(model, bits)


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([3], {}, "tokens must have shape"),
        (mx.zeros((1, 8), dtype=mx.int32), {}, "tokens must have shape"),
        ([1, 2, 3], {"chunk": 0}, "chunk must be at least 1, but got 0"),
        ([1, 2, 3], {"skip": -1}, "skip must leave"),
        ([1, 2, 3], {"skip": 2}, "skip must leave"),
    ],
)
def test_bad_arguments(model, tokens, options, message):
    with pytest.raises(ValueError, match=rf"\[compare\] {message}"):
        evaluate(model, tokens, lambda: stock_cache(model), **options)


def test_no_caches(model, ids):
    with pytest.raises(ValueError, match=r"\[compare\] caches must name at least one"):
        compare(model, ids, {})


def test_calibration_text_ships():
    text = evaluation.calibration_text()
    assert len(text) > 16_000
    assert text.isascii()
    assert not any(line != line.strip() for line in text.splitlines())
    assert "Gutenberg" not in text
