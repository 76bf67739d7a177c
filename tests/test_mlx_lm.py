"""The adapter: models of mlx_lm with compressed caches, two routes through the same codec."""

from __future__ import annotations

import copy
import gc
import importlib
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as stock
from mlx_lm.models import llama as mlx_llama

import tiny
from vqkv_ext.adapters.mlx_lm import (
    disable_attention,
    enable_attention,
    make_prompt_cache,
    model_shape,
)
from vqkv_ext.cache import CompressedKVCache

TOLERANCE = 2e-4  # of logits, float32: summation order through two layers


@pytest.fixture
def model():
    m = tiny.llama()
    yield m
    disable_attention(m)


def greedy(model, cache, prompt, n, **kw):
    steps = generate_step(mx.array(prompt), model, max_tokens=n, prompt_cache=cache, **kw)
    return [int(token) for token, _ in steps]


@pytest.mark.sim
@pytest.mark.parametrize(
    ("config", "n", "chunkings"),
    [
        (tiny.SMALL, 40, ([1] * 40, [20, 20], [7] * 5 + [5], [39, 1], [1, 39])),
        (tiny.DEFAULT, 520, ([256, 264], [257, 263], [255, 1, 1, 263], [64] * 8 + [8])),
    ],
)
def test_chunking_does_not_change_the_logits(model, config, n, chunkings):
    """Case T03."""
    tokens = tiny.ids(n)
    want = tiny.run(model, cache := tiny.compressed(model, config), tokens)
    assert cache[0].coded_tokens > 0 and bool(mx.isfinite(want).all())
    for chunks in chunkings:
        got = tiny.run(model, tiny.compressed(model, config), tokens, chunks)
        assert mx.abs(got - want).max() < TOLERANCE, chunks


def test_prefill_step_size_does_not_change_tokens(model):
    tokens = tiny.ids(40)
    want = greedy(model, tiny.compressed(model), tokens, 8)
    for step in (1, 2, 4):
        assert greedy(model, tiny.compressed(model), tokens, 8, prefill_step_size=step) == want


def test_import_order_and_attributes():
    """Case T01: enabling works whether the model's module was imported before or after."""
    m = tiny.llama()
    tokens = tiny.ids(40)
    cache = tiny.compressed(m)
    for c in cache:
        assert not hasattr(c, "bits") and not hasattr(c, "group_size")
    want = greedy(m, cache, tokens, 4)
    disable_attention(m)
    importlib.reload(mlx_llama)
    m = tiny.llama()
    got = greedy(m, tiny.compressed(m), tokens, 4)
    disable_attention(m)
    assert got == want


def test_enabling_is_idempotent_and_reversible(model):
    original = mlx_llama.scaled_dot_product_attention
    assert enable_attention(model) == ["mlx_lm.models.llama"]
    first = mlx_llama.scaled_dot_product_attention
    enable_attention(model)
    assert mlx_llama.scaled_dot_product_attention is first is not original
    # stock caches still work, and give what they gave before
    with_stock = tiny.run(model, stock.make_prompt_cache(model), tiny.ids(20))
    disable_attention(model)
    disable_attention(model)
    assert mlx_llama.scaled_dot_product_attention is original
    assert mx.array_equal(with_stock, tiny.run(model, stock.make_prompt_cache(model), tiny.ids(20)))


def test_models_of_one_architecture_are_disabled_one_by_one(model):
    tiny.compressed(model)  # fits codecs to a model of its own, which binds attention
    gc.collect()
    disable_attention(model)  # what models of other tests have left bound
    original = mlx_llama.scaled_dot_product_attention
    assert not hasattr(original, "vqkv_original")
    other = tiny.llama(seed=4)
    cache = tiny.compressed(other)
    enable_attention(model)
    disable_attention(model)
    assert bool(mx.isfinite(tiny.run(other, cache, tiny.ids(20))).all())
    disable_attention(other)
    assert mlx_llama.scaled_dot_product_attention is original


def test_disabled_attention_says_so(model):
    cache = tiny.compressed(model)
    gc.collect()  # models of other tests would keep it enabled
    disable_attention(model)
    with pytest.raises(TypeError):
        tiny.run(model, cache, tiny.ids(5))


@pytest.mark.sim
def test_trim_and_continue(model):
    """Case T16 with a model: within one block of grace, as if never seen."""
    for config, total, more in ((tiny.SMALL, 40, 17), (tiny.DEFAULT, 240, 17)):
        block = config.block
        for n in (0, 1, 7, block - 1, block):
            cache = tiny.compressed(model, config)
            tiny.run(model, cache, tiny.ids(total))
            assert cache[0].coded_tokens > 0
            assert stock.can_trim_prompt_cache(cache)
            assert stock.trim_prompt_cache(cache, n) == n
            assert len({c.offset for c in cache}) == 1
            fresh = tiny.compressed(model, config)
            tiny.run(model, fresh, tiny.ids(total)[: total - n])
            rest = tiny.ids(more, seed=2)
            a, b = tiny.run(model, cache, rest), tiny.run(model, fresh, rest)
            assert mx.abs(a - b).max() < TOLERANCE


def test_fresh_list(model):
    """Case T02 for the list the adapter gives."""
    cache = tiny.compressed(model)
    assert len(cache) == 2 and all(isinstance(c, CompressedKVCache) for c in cache)
    mx.eval([c.state for c in cache])
    assert all(c.empty() and c.nbytes == 0 for c in copy.deepcopy(cache))
    tiny.run(model, cache, tiny.ids(5))
    assert all(c.size() == 5 for c in cache)


def test_deepcopy_goes_its_own_way(model):
    tokens = tiny.ids(60)
    cache = tiny.compressed(model)
    tiny.run(model, cache, tokens[:40])
    other = copy.deepcopy(cache)
    a = tiny.run(model, cache, tokens[40:])
    b = tiny.run(model, other, tokens[40:])
    assert mx.array_equal(a, b) and cache[0].offset == other[0].offset == 60


def test_nothing_is_dense(model):
    """Bytes per token as advertised, and far from those of the stock cache."""
    tokens = tiny.ids(2000)
    cache, dense = tiny.compressed(model, tiny.DEFAULT), stock.make_prompt_cache(model)
    tiny.run(model, cache, tokens, [500] * 4)
    tiny.run(model, dense, tokens, [500] * 4)
    body = sum(a.nbytes for c in cache for b in c._bodies for a in b.values())
    capacity = cache[0]._bodies[0]["codes"].shape[2]
    assert body == capacity * 2 * cache[0].bytes_per_token
    assert 16 * body <= sum(c.nbytes for c in dense) * 1.05  # float32 model: 32 bits against 2
    assert all(c.nbytes == sum(a.nbytes for a in c._arrays()) for c in cache)


def test_model_shape(model):
    shape = model_shape(model)
    assert (shape.layers, shape.kv_heads, shape.key_dim, shape.value_dim) == (2, 2, 64, 64)


def test_refusals(model, tmp_path):
    with pytest.raises(ValueError, match=r"\[make_prompt_cache\] vecinfer-2bit must be calibrated"):
        make_prompt_cache(model, "vecinfer-2bit")
    with pytest.raises(FileNotFoundError, match="must be a file, but"):
        make_prompt_cache(model, tmp_path / "nothing.safetensors")
    other = tiny.llama(head_dim=32)
    with pytest.raises(ValueError, match="key_dim 64 but the model has 32"):
        make_prompt_cache(other, tiny.calibration(64))


def test_quality_is_that_of_the_codec(model):
    """Not a threshold on quality: attention over codes equals dense attention over decoded ones."""
    tokens = tiny.ids(60)
    cache = tiny.compressed(model)
    tiny.run(model, cache, tokens[:59])
    dense = stock.make_prompt_cache(model)
    for c, d in zip(cache, dense, strict=True):
        from test_cache import decoded

        k, v = decoded(c)
        d.update_and_fetch(k, v)
    a = tiny.run(model, cache, tokens[59:])
    b = tiny.run(model, dense, tokens[59:])
    assert mx.abs(a - b).max() < 5e-2 * mx.abs(b).max() + TOLERANCE


def test_generate_in_a_new_process():
    """The one-line use, as a script (an interpreter of its own, no test fixtures)."""
    code = """
import mlx.core as mx, tiny
from mlx_lm.generate import generate_step
m = tiny.llama()
c = tiny.compressed(m)
print([int(t) for t, _ in generate_step(mx.array(tiny.ids(40)), m, max_tokens=6, prompt_cache=c)])
print(c[0].coded_tokens)
"""
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True,
        cwd=str(__import__("pathlib").Path(__file__).parent), check=True,
    ).stdout.splitlines()  # fmt: skip
    m = tiny.llama()
    assert out[0] == str(greedy(m, tiny.compressed(m), tiny.ids(40), 6))
    assert int(out[1]) > 0
    assert np.isfinite(float(out[1]))
