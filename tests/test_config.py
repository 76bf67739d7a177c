"""KVCacheConfig, the factory and the builder."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache as stock_cache

import tiny
from vqkv_ext.adapters.mlx_lm import disable_attention
from vqkv_ext.cache import CompressedKVCache
from vqkv_ext.config import KVCacheBuilder, KVCacheConfig, KVCacheFactory

WINDOWS = {"sink_tokens": 2, "window": 8, "block": 8}


@pytest.fixture
def model():
    m = tiny.llama()
    yield m
    disable_attention(m)


def names(cache):
    return cache.key_codec.name, cache.value_codec.name


def test_default_is_centred_4bit(model):
    caches = KVCacheBuilder.for_model(model, KVCacheConfig())
    assert [names(c) for c in caches] == [("centred-4bit", "centred-4bit")] * 2
    assert caches[0].key_codec.centred and not caches[0].value_codec.centred


@pytest.mark.parametrize(
    ("key", "value"),
    [("turboquant-4bit", "turboquant-2bit"), ("none", "turboquant-4bit"), ("qjl-1bit", "none")],
)
def test_any_key_code_with_any_value_code(model, key, value):
    config = KVCacheConfig(key=key, value=value, **WINDOWS)
    ids = tiny.ids(60)
    whole = tiny.run(model, caches := KVCacheBuilder.for_model(model, config), ids)
    parts = tiny.run(model, KVCacheBuilder.for_model(model, config), ids, [1] * 10 + [25, 25])
    assert names(caches[0]) == (key, value) and caches[0].coded_tokens > 0
    # a code may flip where keys of another chunk differ in the last digit
    dense = tiny.run(model, stock_cache(model), ids)
    assert mx.abs(whole - parts).max() < 0.02 * mx.abs(whole - dense).max()


def test_write_up_fields(rng, model):
    """What a user of the write-ups' field names writes, with only the import changed."""
    config = KVCacheConfig(
        method="vecinfer", head_dim=64, key_sub_dim=4, value_sub_dim=4, key_codebook_bits=8,
        smooth_factors=np.full(64, 1.5), key_codebook=rng.standard_normal((256, 4)),
        use_metal_kernels=None, **WINDOWS,
    )  # fmt: skip
    cache = KVCacheFactory.create(config)
    assert isinstance(cache, CompressedKVCache)
    assert names(cache) == ("vecinfer-2bit", "turboquant-2bit")
    assert float(cache.key_codec.transform.diagonal.max()) == 1.5
    caches = KVCacheBuilder.for_model(model, config)
    logits = tiny.run(model, caches, tiny.ids(60))
    assert len(caches) == 2 and caches[0].coded_tokens > 0 and bool(mx.isfinite(logits).all())
    with_values = KVCacheConfig(
        method="vecinfer", head_dim=64, key_codebook=rng.standard_normal((256, 4)),
        value_codebook=rng.standard_normal((2, 1, 256, 4)), smooth_factors=np.ones((2, 64)),
    )  # fmt: skip
    assert names(KVCacheFactory.create(with_values)) == ("vecinfer-2bit", "vecinfer-2bit")


def test_write_up_fields_of_twelve_bits(rng):
    book = rng.standard_normal((4096, 8))
    config = KVCacheConfig(
        method="vecinfer", head_dim=64, key_sub_dim=8, value_sub_dim=8, key_codebook_bits=12,
        value_codebook_bits=12, key_codebook=book, value_codebook=book,
    )  # fmt: skip
    cache = KVCacheFactory.create(config)
    assert names(cache) == ("vecinfer-1.5bit", "vecinfer-1.5bit")
    assert cache.key_codec.bytes_per_token == cache.value_codec.bytes_per_token == 12
    with pytest.raises(ValueError, match=r"must be \[256, 8\].*but got shape \(4096, 8\)"):
        KVCacheFactory.create(replace(config, key_codebook_bits=8))


@pytest.mark.parametrize("method", ["turboquant", "turboquant-rvq", "centred", "qjl"])
def test_methods_by_name(method):
    cache = KVCacheFactory.create(KVCacheConfig(method=method, head_dim=128, bits=2))
    assert cache.key_codec.name == f"{method}-2bit"


def test_layers_may_differ(model):
    config = KVCacheConfig(
        key="turboquant-4bit", value="turboquant-2bit", **WINDOWS,
        per_layer={1: {"key": "none", "value": "none", "window": 16}},
    )  # fmt: skip
    caches = KVCacheBuilder.for_model(model, config)
    assert names(caches[0]) == ("turboquant-4bit", "turboquant-2bit")
    assert names(caches[1]) == ("none", "none") and caches[1].config.window == 16
    alike = KVCacheBuilder.for_model(model, KVCacheConfig(**WINDOWS))
    assert alike[0].key_codec is alike[1].key_codec
    assert bool(mx.isfinite(tiny.run(model, caches, tiny.ids(60))).all())


@pytest.mark.parametrize(
    ("kw", "message"),
    [
        ({"method": "kivi"}, "method must be one of vecinfer"),
        ({"method": "qjl", "key": "none"}, "must come without key and value"),
        ({"method": "vecinfer"}, "must have a key_codebook"),
        ({"method": "vecinfer", "key_codebook_bits": 9}, "key_codebook_bits must be 8 or 12"),
        ({"window": -1}, "window must be an integer >= 0"),
    ],
)
def test_bad_configs(kw, message):
    with pytest.raises(ValueError, match=message):
        KVCacheConfig(**kw)


def test_bad_use(model, rng):
    book = rng.standard_normal((256, 4))
    for config, message in (
        (KVCacheConfig(), "must have a head_dim"),
        (KVCacheConfig(head_dim=64, key="turboquant-9bit"), "the preset must be one of"),
        (KVCacheConfig(head_dim=64, method="turboquant", bits=1.5), "the preset must be one of"),
        (KVCacheConfig(head_dim=66, method="vecinfer", key_codebook=book), "must divide head_dim"),
        (KVCacheConfig(head_dim=72, method="vecinfer", key_codebook=book), "but got 72"),
        (
            KVCacheConfig(head_dim=64, method="vecinfer", key_codebook=book[:, :2]),
            "a codebook must",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            KVCacheFactory.create(config)
    with pytest.raises(ValueError, match="head_dim must be the model's 64, but got 128"):
        KVCacheBuilder.for_model(model, KVCacheConfig(head_dim=128))
    with pytest.raises(ValueError, match="must name layers that are compressed, 0, 1, but got 7"):
        KVCacheBuilder.for_model(model, KVCacheConfig(per_layer={7: {}}))
