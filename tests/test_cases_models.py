"""Models whose layers differ: attention sinks, softcaps, sliding windows, recurrent layers. Each
case at lengths of a few tokens, and at the default windows with longer ones."""

from __future__ import annotations

import logging

import mlx.core as mx
import pytest
from mlx_lm.models import cache as stock
from mlx_lm.models import gemma2, gemma3_text, gpt_oss, qwen3_next

import tiny
import writing
from vqkv_ext.adapters.attention import layer_modules
from vqkv_ext.adapters.mlx_lm import disable_attention, make_prompt_cache
from vqkv_ext.cache import CompressedKVCache
from vqkv_ext.evaluation import compare

pytestmark = pytest.mark.usefixtures("one_blas_thread", "no_compile")
LENGTHS = [(tiny.SMALL, 12), (tiny.DEFAULT, 144)]
HALF = 5e-3  # of the largest logit: the preset none stores float16, mlx_lm's cache float32


def ready(model, embeddings):
    """Embeddings of the size of trained ones, so that attention is neither flat nor one-hot."""
    embeddings.weight = mx.random.normal((97, 32))
    model.eval()
    mx.eval(model.parameters())
    return model


def tiny_gpt_oss():
    """Layers of window 8 in turn with full ones. What the experts pass on for 144 tokens has less
    than 16 KiB: of more, MLX 0.32.4 on CUDA at times reads the rows at a wrong stride, where a sum
    with a bias has taken the strides of the bias."""
    mx.random.seed(3)
    args = gpt_oss.ModelArgs(
        num_hidden_layers=4, num_local_experts=2, num_experts_per_tok=1, vocab_size=97,
        hidden_size=32, intermediate_size=16, head_dim=64, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8, rope_theta=10000,
    )  # fmt: skip
    model = gpt_oss.Model(args)
    for layer in model.layers:
        layer.self_attn.sinks = mx.linspace(-5, 5, 4)
    return ready(model, model.model.embed_tokens)


def tiny_gemma3():
    mx.random.seed(3)
    args = gemma3_text.ModelArgs(
        model_type="gemma3_text", hidden_size=32, num_hidden_layers=4, intermediate_size=64,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=97,
        sliding_window=8, sliding_window_pattern=2, query_pre_attn_scalar=64,
    )  # fmt: skip
    model = gemma3_text.Model(args)
    return ready(model, model.model.embed_tokens)


def tiny_qwen3_next():
    """Three recurrent layers, then one of attention."""
    mx.random.seed(3)
    args = qwen3_next.ModelArgs(
        model_type="qwen3_next", hidden_size=32, num_hidden_layers=4, intermediate_size=64,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=97,
        linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=32,
        linear_value_head_dim=32, linear_conv_kernel_dim=4, num_experts=2, num_experts_per_tok=1,
        decoder_sparse_step=1, shared_expert_intermediate_size=32, mlp_only_layers=[],
        moe_intermediate_size=32, rms_norm_eps=1e-5, rope_theta=10000, partial_rotary_factor=0.5,
        max_position_embeddings=1000,
    )  # fmt: skip
    model = qwen3_next.Model(args)
    return ready(model, model.model.embed_tokens)


def agrees(model, config, chunks) -> list:
    """The adapter's list after the tokens, whose logits are those of the stock list."""
    ids = tiny.ids(sum(chunks))
    cache = make_prompt_cache(model, "none", config=config)
    try:
        got = tiny.run(model, cache, ids, chunks)
    finally:
        disable_attention(model)
    want = tiny.run(model, stock.make_prompt_cache(model), ids, chunks)
    far = mx.abs(got - want).max(axis=-1) >= HALF * mx.abs(want).max()
    assert not mx.any(far), f"tokens {[i for i, x in enumerate(far.tolist()) if x]} are far off"
    return cache


@pytest.mark.sim
@pytest.mark.parametrize(("config", "n"), LENGTHS)
def test_t10_gpt_oss(config, n):
    """Case T10: attention sinks."""
    cache = agrees(tiny_gpt_oss(), config, [n] + [1] * 30)
    assert [type(c) for c in cache] == [stock.RotatingKVCache, CompressedKVCache] * 2
    assert all(c.coded_tokens > 0 for c in cache[1::2])


def test_t11_gemma2():
    """Case T11: the scores pass through a softcap, which mlx_lm computes by hand."""
    mx.random.seed(3)
    args = gemma2.ModelArgs(
        model_type="gemma2", hidden_size=32, num_hidden_layers=2, intermediate_size=64,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-5,
        vocab_size=97, attn_logit_softcapping=50.0,
    )  # fmt: skip
    model = gemma2.Model(args)
    ready(model, model.model.embed_tokens)
    ids, chunks = tiny.ids(15), [12, 1, 1, 1]
    before = tiny.run(model, stock.make_prompt_cache(model), ids, chunks)
    with pytest.raises(
        ValueError,
        match=r"\[make_prompt_cache\] gemma2 must have a layer whose cache can be compressed, but "
        r"got layers 0, 1: KVCache, Attention.__call__ of mlx_lm.models.gemma2 reads keys and "
        r"values without mlx_lm's scaled_dot_product_attention",
    ):
        make_prompt_cache(model, "centred-4bit")
    assert layer_modules(model) == []
    after = tiny.run(model, stock.make_prompt_cache(model), ids, chunks)
    assert mx.array_equal(before, after)


@pytest.mark.parametrize("build", [tiny_gemma3, tiny_gpt_oss])
@pytest.mark.parametrize(("config", "n"), LENGTHS)
def test_t12_sliding_windows(build, config, n, caplog):
    """Case T12: two of four layers are compressed, the others stay rings of 8 tokens."""
    with caplog.at_level(logging.INFO, logger="vqkv_ext"):
        cache = agrees(build(), config, [n] + [1] * 30)
    said = [r for r in caplog.records if "2 of 4 caches are compressed" in r.getMessage()]
    assert [r.levelno for r in said] == [logging.INFO]
    assert "layers 0, 2: RotatingKVCache, keeps a sliding window only" in said[0].getMessage()
    for ring, full in zip(cache[::2], cache[1::2], strict=True):
        assert type(ring) is stock.RotatingKVCache and type(full) is CompressedKVCache
        assert ring.keys.shape[2] == 8 and ring.offset == full.offset == n + 30
        assert full.coded_tokens > 0


@pytest.mark.parametrize(("config", "n"), LENGTHS)
def test_t13_qwen3_next(config, n):
    """Case T13: one of four layers has a cache that grows, and it is the last."""
    model = tiny_qwen3_next()
    cache = agrees(model, config, [n, 1, 1, 1, 8])
    assert [type(c) for c in cache] == [stock.ArraysCache] * 3 + [CompressedKVCache]
    assert not hasattr(cache[0], "offset") and not hasattr(cache[0], "keys")
    assert cache[3].coded_tokens > 0


def test_t13_bytes():
    model = tiny_qwen3_next()
    compressed = make_prompt_cache(model, "centred-4bit", config=tiny.SMALL)
    own = stock.make_prompt_cache(model)
    tiny.run(model, compressed, tiny.ids(256))
    tiny.run(model, own, tiny.ids(256))
    disable_attention(model)
    assert compressed[3].nbytes < 0.4 * own[3].nbytes
    assert sum(c.nbytes for c in compressed[:3]) == sum(c.nbytes for c in own[:3])


def _kl_of_biased_keys(bias: float, preset: str) -> float:
    """Of a model with a bias on the two channels that its rotary embedding hardly turns: the same
    for all tokens, which softmax does not see."""
    model = writing.qwen2(hidden_size=256, rope_theta=1e6)
    for layer in model.model.layers:
        held = layer.self_attn.k_proj.bias.reshape(2, 64)
        slow = mx.array([c in (31, 63) for c in range(64)])
        layer.self_attn.k_proj.bias = mx.where(slow, held + bias, held).reshape(-1)
    caches = {preset: lambda: make_prompt_cache(model, preset)}
    return compare(model, tiny.ids(400), caches)[preset].kl


def test_t23_a_bias_of_600_costs_a_model_nothing_once_the_mean_is_taken():
    for preset in ("centred-4bit", "centred-2bit", "trellis-4bit", "trellis-2bit"):
        assert 0 < _kl_of_biased_keys(600, preset) <= 2 * _kl_of_biased_keys(0, preset), preset
    without = "turboquant-2bit"  # subtracts nothing
    assert _kl_of_biased_keys(600, without) > 2 * _kl_of_biased_keys(0, without)
