"""Which caches are compressed: what the adapter finds out by trying a model out."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models import cache as stock
from mlx_lm.models import llama

import architectures
import tiny
from vqkv_ext.adapters.attention import bind_model, layer_modules
from vqkv_ext.adapters.calibrate import calibrate
from vqkv_ext.adapters.layers import UNUSED, cache_slots
from vqkv_ext.adapters.mlx_lm import disable_attention, make_prompt_cache, model_shape
from vqkv_ext.cache import CompressedKVCache
from vqkv_ext.compressed_array import CompressedArray, ForeignUse
from vqkv_ext.config import KVCacheBuilder, KVCacheConfig

pytestmark = pytest.mark.usefixtures("one_blas_thread", "no_compile")


@pytest.fixture
def built():
    """Builds tiny models, with attention as it was afterwards."""
    models = []

    def build(name):
        models.append(tiny.llama() if name == "llama" else architectures.build(name))
        return models[-1]

    yield build
    for m in models:
        disable_attention(m)


class Odd(llama.Attention):
    """Attention that does with its cache what a function says."""

    def __call__(self, x, mask=None, cache=None):
        return self.odd(x, cache)


def with_odd_layer(model, odd):
    """The first layer's attention replaced."""
    layer = model.model.layers[0]
    attention = Odd(model.args)
    attention.odd = lambda x, cache: odd(attention, x, cache)
    layer.self_attn = attention
    return model


def kv(attention, x):
    shape = (*x.shape[:2], attention.n_kv_heads, -1)
    keys, values = attention.k_proj(x), attention.v_proj(x)
    return (y.reshape(shape).transpose(0, 2, 1, 3) for y in (keys, values))


def reads_at_decode(attention, x, cache):
    """Passes handles on in a prompt, uses them as arrays for single tokens."""
    keys, values = cache.update_and_fetch(*kv(attention, x))
    if x.shape[1] == 1:
        return x + keys[0, 0, -1, 0]
    q = attention.q_proj(x).reshape(*x.shape[:2], attention.n_heads, -1).transpose(0, 2, 1, 3)
    out = llama.scaled_dot_product_attention(q, keys, values, cache, 0.1, "causal")
    return attention.o_proj(out.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1))


def ignores(attention, x, cache):
    cache.update_and_fetch(*kv(attention, x))
    return x


def reads_attribute(attention, x, cache):
    cache.update_and_fetch(*kv(attention, x))
    return x + cache.keys[0, 0, 0, 0]


def too_wide(attention, x, cache):
    wide = mx.zeros((1, 1, x.shape[1], 580))
    cache.update_and_fetch(wide, wide)
    return x


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (reads_at_decode, "reads_at_decode of test_layers reads keys and values without mlx_lm's"),
        (reads_attribute, "reads_attribute of test_layers reads keys and values without mlx_lm's"),
        (ignores, "attention does not read what it returns"),
        (too_wide, "keys must be 8 to 576 wide, but are 580"),
        (lambda attention, x, cache: x, UNUSED),
    ],
)
def test_a_layer_that_cannot_be_served(built, odd, reason, caplog):
    model = with_odd_layer(built("llama"), odd)
    first, second = cache_slots(model)
    assert reason in first.reason and first.kind == "KVCache"
    assert second.reason is None and (second.kv_heads, second.key_dim) == (2, 64)
    cache = make_prompt_cache(model, "none", config=tiny.SMALL)
    assert [type(c) for c in cache] == [stock.KVCache, CompressedKVCache]
    # that it stays dense is said aloud, unless it holds nothing
    assert bool(caplog.records) is (reason != UNUSED)
    ids, chunks = tiny.ids(40), [20, 1, 19]
    got = tiny.run_some(model, cache, ids, chunks)
    want = tiny.run_some(model, stock.make_prompt_cache(model), ids, chunks)
    assert mx.abs(got - want).max() < 5e-3 * mx.abs(want).max()


def test_errors_of_the_model_itself(built):
    """A model that fails with its own caches says so; attention is left as it was."""

    def broken(attention, x, cache):
        raise KeyError("nothing to do with a cache")

    model = with_odd_layer(built("llama"), broken)
    with pytest.raises(
        ValueError, match=r"\[make_prompt_cache\] llama must run with its own cache.*nothing to do"
    ):
        make_prompt_cache(model, "none")
    assert len(bind_model(model)) == len(layer_modules(model)) == 1


def test_nothing_is_evaluated(built):
    model = built("llama")
    cache_slots(model)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    cache_slots(model)
    hidden = 2 * 32 * 4  # bytes of two tokens
    assert mx.get_peak_memory() - before < hidden


def test_layers_of_different_heads(built):
    model = built("openelm")
    slots = cache_slots(model)
    assert [s.kv_heads for s in slots] == [2, 2, 4, 4]
    with pytest.raises(ValueError, match="all layers must have one cache of equal heads"):
        model_shape(model)
    with pytest.raises(ValueError, match="all layers must have one cache of equal heads"):
        calibrate(model, tiny.ids(256), "vecinfer-2bit")
    cache = make_prompt_cache(model, "centred-4bit", config=tiny.SMALL)
    assert cache[0].key_codec is cache[3].key_codec  # of equal width
    assert bool(mx.isfinite(tiny.run(model, cache, tiny.ids(40))).all())


def test_config_of_a_model_of_mixed_layers(built):
    model = built("gemma3_text")  # layers 1 and 3 are compressed
    config = KVCacheConfig(per_layer={3: {"key": "none", "value": "none"}}, head_dim=16)
    cache = KVCacheBuilder.for_model(model, config)
    assert [getattr(c, "key_codec", None) and c.key_codec.name for c in cache] == [
        None, "centred-4bit", None, "none",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="must name layers that are compressed, 1, 3, but got 0"):
        KVCacheBuilder.for_model(model, KVCacheConfig(per_layer={0: {}}))
    with pytest.raises(ValueError, match="head_dim must be the model's 16, but got 64"):
        KVCacheBuilder.for_model(model, KVCacheConfig(head_dim=64))


@pytest.mark.parametrize(("name", "layers"), [("gemma3_text", [1, 3]), ("falcon_h1", [0, 1, 2, 3])])
def test_calibration_of_a_model_of_mixed_layers(built, name, layers, tmp_path):
    """Codecs are fitted to the compressed caches and come back to them."""
    model = built(name)
    calibration = calibrate(model, tiny.ids(256), "vecinfer-2bit", iterations=2)
    assert calibration.shape == model_shape(model) and calibration.shape.layers == len(layers)
    calibration.save(tmp_path / "c.safetensors")
    cache = make_prompt_cache(model, tmp_path / "c.safetensors", config=tiny.SMALL)
    for layer, pair in zip(layers, calibration.layers, strict=True):
        own = cache[layer].caches[1] if name == "falcon_h1" else cache[layer]
        assert own.key_codec.fingerprint == pair.key.fingerprint
    assert bool(mx.isfinite(tiny.run_some(model, cache, tiny.ids(40), [30, 10])).all())


def test_float32_attention_over_a_bfloat16_cache(built):
    """stablelm casts queries and keys to float32 before attention, and not values."""
    model = built("stablelm")
    model.set_dtype(mx.bfloat16)
    cache = make_prompt_cache(model, "none", config=tiny.SMALL)
    ids, chunks = tiny.ids(40), [20, 1, 19]
    got = tiny.run_some(model, cache, ids, chunks)
    want = tiny.run_some(model, stock.make_prompt_cache(model), ids, chunks)
    assert cache[0].coded_tokens > 0 and got.dtype == want.dtype == mx.bfloat16
    assert mx.abs(got - want).max() < 4e-2 * mx.abs(want).max()


@pytest.mark.parametrize("name", ["gemma3n", "afm7", "gemma4", "hunyuan", "iquestloopcoder"])
def test_layers_that_read_another_layers_cache(built, name):
    """What is generated does not depend on the chunks of the prompt. Where those layers ask for
    the cache after the chunk is stored, logits within the prompt do."""
    model, ids = built(name), tiny.ids(60)
    whole, ones, halves = (
        tiny.run_some(
            model, make_prompt_cache(model, "turboquant-2bit", config=tiny.SMALL), ids, chunks
        )
        for chunks in ([59, 1], [1] * 60, [30, 29, 1])
    )
    at_end = name in ("gemma3n", "afm7")
    limit = 1e-4 * mx.abs(ones).max()
    for other in (whole, halves):
        assert mx.abs(other - ones)[58:].max() < limit  # the prompt's last token, and one more
        assert (mx.abs(other - ones).max() > limit) == at_end


def test_handles_refuse_arithmetic(built):
    model = built("llama")
    cache = make_prompt_cache(model, "none")
    tiny.run(model, cache, tiny.ids(5))
    keys, values = cache[0].keys_and_values()
    q = mx.zeros((1, 4, 1, 64))
    for use in (
        lambda: keys @ q, lambda: keys * 2, lambda: 2 - keys, lambda: keys[0], lambda: -keys,
        lambda: keys.swapaxes(-1, -2), lambda: keys > 0, lambda: len(keys), lambda: list(keys),
    ):  # fmt: skip
        with pytest.raises(ForeignUse) as caught:
            use()
        assert caught.value.array is keys
    with pytest.raises(TypeError, match="matmul"):
        q @ keys
    with pytest.raises(TypeError, match="both come from a compressed cache, but got CompressedArr"):
        llama.scaled_dot_product_attention(q, keys, q, cache[0], 1.0, None)
    half = keys.astype(mx.float16)
    assert isinstance(half, CompressedArray) and half.dtype == mx.float16
    assert half.shape == keys.shape and half.packed.layout is keys.packed.layout
    assert keys.astype(keys.dtype) is keys and values.dtype == mx.float32
