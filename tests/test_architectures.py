"""Every architecture of the installed mlx_lm: what is compressed of it, and that its logits are
those of mlx_lm's own caches."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as stock

from vqkv_ext.adapters.attention import bind_model, layer_modules
from vqkv_ext.adapters.layers import places
from vqkv_ext.adapters.mlx_lm import disable_attention, make_prompt_cache
from vqkv_ext.cache import CacheConfig, CompressedKVCache
from vqkv_ext.packed import coded_tokens

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import architecture_table  # noqa: E402

import architectures  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_blas_thread", "no_compile")

SMALL = CacheConfig(sink_tokens=2, window=8, block=8)
CHUNKS = [12, 1, 1, 1, 1, 1, 1, 6, 1]  # 25 tokens, the last 8 coded in the chunk of 6
TOLERANCE = 5e-4  # of the largest logit; seen: 7e-5, and 1e-2 or more where codes of 1 bit are read
CODED = coded_tokens(sum(CHUNKS), 2, 8, 8)
NAMES = architectures.names()


@functools.cache
def found(name: str) -> Any:
    return architecture_table.find(name)


def rounded(cache: Any) -> Any:
    """Keys and values rounded to float16 before they are stored: the preset ``none`` then keeps
    exactly what it gets."""
    append = cache.update_and_fetch

    def half(x: mx.array) -> mx.array:
        return x.astype(mx.float16).astype(x.dtype)

    cache.update_and_fetch = lambda keys, values: append(half(keys), half(values))
    return cache


def run(model, caches: list[Any], chunks: list[int] = CHUNKS) -> mx.array:
    """Logits ``[tokens, vocab]``, evaluated call by call as mlx_lm does."""
    ids, at, logits = [(7 * i + i * i) % 89 + 1 for i in range(sum(chunks))], 0, []
    for n in chunks:
        logits.append(model(mx.array([ids[at : at + n]]), cache=caches)[0])
        mx.eval(logits[-1], [c.state for _, c in places(caches) if not c.empty()])
        at += n
    return mx.concatenate(logits)


@pytest.mark.parametrize("name", NAMES)
def test_architecture(name):
    slots = found(name)
    model = architectures.build(name)
    if isinstance(slots, ValueError):
        with pytest.raises(ValueError, match=r"^\[make_prompt_cache\] .* must .*, but got "):
            make_prompt_cache(model, "none", config=SMALL)
        assert len(bind_model(model)) == len(layer_modules(model))  # was not left enabled
        disable_attention(model)
        return
    own, ours = stock.make_prompt_cache(model), make_prompt_cache(model, "none", config=SMALL)
    served = {s.place for s in slots if s.reason is None}
    assert served and [p for p, _ in places(ours)] == [s.place for s in slots]
    for (place, mine), (_, theirs) in zip(places(ours), places(own), strict=True):
        assert type(mine) is (CompressedKVCache if place in served else type(theirs))
        assert type(theirs) is stock.KVCache or place not in served
        assert not hasattr(mine, "bits") and not hasattr(mine, "group_size")
        if place in served:
            rounded(mine), rounded(theirs)
    try:
        got, want = run(model, ours), run(model, own)
        finite = mx.isfinite(want)
        assert mx.array_equal(mx.isfinite(got), finite) and finite.any(axis=-1).all()
        difference = mx.where(finite, mx.abs(got - want), 0).max()
        assert difference <= TOLERANCE * mx.where(finite, mx.abs(want), 0).max()

        coded = make_prompt_cache(model, "centred-4bit", config=SMALL)
        few = run(model, coded, [12, 6, 6, 1])
        assert mx.array_equal(mx.isfinite(few), finite)
        assert not mx.array_equal(few, got)  # codes were read
    finally:
        disable_attention(model)
    for s in slots:
        if s.reason is None:
            for caches in (ours, coded):
                cache = dict(places(caches))[s.place]
                assert cache.coded_tokens == CODED > 0
            dense = s.kv_heads * (s.key_dim + s.value_dim) * 2  # 16 bits
            assert cache.bytes_per_token < 0.45 * dense


def test_the_document_is_what_is_found():
    document = architecture_table.document({name: found(name) for name in NAMES})
    assert architecture_table.PATH.read_text() == document, (
        "run `python tools/architecture_table.py` and read what changed"
    )


def test_the_readme_has_the_counts():
    counts = architecture_table.counts({name: found(name) for name in NAMES})
    text = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    assert f"{len(NAMES)} architectures of mlx_lm" in text and counts in text
