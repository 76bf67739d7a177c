"""Greedy continuations: what is counted is what generation gives."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import pytest

import tiny
import writing
from vqkv_ext.adapters.mlx_lm import make_prompt_cache
from vqkv_ext.agreement import agreement
from vqkv_ext.evaluation import stock_cache

LENGTH, PROMPTS = 8, 2


def test_counts_are_those_of_generation():
    model, tokens = writing.llama(), tiny.ids(400, seed=2)
    presets = ("centred-4bit", "turboquant-1bit")
    caches = {p: partial(make_prompt_cache, model, p) for p in presets}
    caches["stock"] = partial(stock_cache, model)
    seen = []
    found = agreement(
        model, tokens, LENGTH, caches, prompts=PROMPTS, progress=lambda *n: seen.append(n)
    )
    assert seen[0] == (200, 1600) and seen[-1] == (1600, 1600)
    for name, make in caches.items():
        want = []
        for i in range(PROMPTS):
            prompt = tokens[: 200 * (i + 1)]
            theirs, margin = writing.greedy(model, prompt, stock_cache(model), LENGTH)
            mine, own = writing.greedy(model, prompt, make(), LENGTH)
            assert min(margin, own) > 1e-4  # else rounding decides
            equal = [a == b for a, b in zip(mine, theirs, strict=True)]
            want.append(equal.index(False) if False in equal else LENGTH)
        assert found[name].same == want, name
    assert found["stock"].mean == LENGTH and found["stock"].whole == PROMPTS
    assert found["turboquant-1bit"].mean < found["centred-4bit"].mean
    assert found["turboquant-1bit"].to_dict()["whole"] < PROMPTS


def test_one_token():
    model = writing.llama()
    caches = {"stock": partial(stock_cache, model)}
    found = agreement(model, tiny.ids(9), 1, caches, prompts=9, chunk=2)
    assert found["stock"].same == [1] * 9


def test_reference_of_ones_own():
    model, tokens = writing.llama(), tiny.ids(200, seed=2)
    coarse = partial(make_prompt_cache, model, "turboquant-1bit")
    caches = {"same": coarse, "stock": partial(stock_cache, model)}
    found = agreement(model, tokens, 6, caches, prompts=1, reference=coarse)
    assert found["same"].same == [6] and found["stock"].same[0] < 6


@pytest.mark.parametrize("bad", [{"length": 0}, {"chunk": 0}, {"prompts": 0}, {"prompts": 10}])
def test_bad_arguments(bad):
    model = writing.llama()
    mx.eval(model.parameters())
    arguments = {"length": 3, "prompts": 2, **bad}
    with pytest.raises(ValueError, match=r"\[agreement\] length, chunk and prompts"):
        agreement(model, tiny.ids(9), caches={}, **arguments)
