"""Bits per layer under a budget."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

import tiny
import writing
from test_cli import fails, save_model
from vqkv_ext import cli
from vqkv_ext.adapters import allocate as module
from vqkv_ext.adapters import sharding
from vqkv_ext.adapters.allocate import Part, allocate, build, choose, measure
from vqkv_ext.adapters.mlx_lm import make_prompt_cache
from vqkv_ext.codecs import Calibration, presets
from vqkv_ext.evaluation import compare

TRELLIS = tuple(f"trellis-{bits}bit" for bits in (1, 2, 3, 4))


@pytest.fixture(scope="module")
def model():
    return writing.llama()


@pytest.fixture(scope="module")
def parts(model) -> list[Part]:
    return measure(model, tiny.ids(300), TRELLIS)


@pytest.mark.parametrize("seed", range(8))
def test_choice_is_the_best_there_is(seed):
    rng = np.random.default_rng(seed)
    costs = (rng.integers(1, 9, (5, 4)) * (1 if seed % 2 else 6)).tolist()
    losses = rng.exponential(size=(5, 4)).tolist()
    least, most = (sum(map(f, costs)) for f in (min, max))
    for budget in (least, least + 1, (least + most) // 2, most, 10 * most):
        chosen = choose(costs, losses, budget)
        cost = sum(row[i] for row, i in zip(costs, chosen, strict=True))
        loss = sum(row[i] for row, i in zip(losses, chosen, strict=True))
        best = min(
            sum(row[i] for row, i in zip(losses, picks, strict=True))
            for picks in itertools.product(range(4), repeat=5)
            if sum(row[i] for row, i in zip(costs, picks, strict=True)) <= budget
        )
        assert cost <= budget and loss == pytest.approx(best)


def test_parts_are_what_the_model_loses(model, parts):
    """The divergence of a part is that of a cache of which nothing else is coded."""
    assert [(p.layer, p.side) for p in parts] == [(i, s) for i in (0, 1) for s in ("key", "value")]
    for part in parts[1:3]:
        none = {"key": "none", "value": "none"}
        coded = {**none, part.side: "trellis-1bit"}
        make = _mixed(model, {part.layer: coded, 1 - part.layer: none})
        (found,) = compare(
            model, tiny.ids(300), {"x": make}, chunk=128, skip=module._UNCODED
        ).values()
        assert part.kl.keys() == {"trellis"}
        assert part.kl["trellis"] == pytest.approx(found.kl, rel=0.02)
        assert part.kl["trellis"] > 0
        errors = [part.errors[n] for n in TRELLIS]
        assert errors[0] == 1 and errors == sorted(errors, reverse=True)
        assert errors[3] < 0.05
        assert part.loss("trellis-2bit") == part.kl["trellis"] * errors[1]


def _mixed(model, layers):
    from vqkv_ext.config import KVCacheBuilder, KVCacheConfig

    return lambda: KVCacheBuilder.for_model(model, KVCacheConfig(per_layer=layers))


def test_budget_is_kept_and_used(model, parts):
    numbers, before = 2 * (64 + 64), np.inf
    for budget in (1.45, 2.0, 2.6, 3.3, 4.4):
        made = build(model, parts, budget, tokens=300)
        pairs = [(x.key, x.value) for x in made.layers]
        stored = 8 * sum(k.bytes_per_token + v.bytes_per_token for k, v in pairs) / numbers
        assert budget - 1 / 4 < stored <= budget  # a part takes 1/4 of a bit more on average
        names = iter(c.name for pair in pairs for c in pair)
        loss = sum(p.loss(n) for p, n in zip(parts, names, strict=True))
        assert loss < before
        before = loss
    assert made.preset == "mixed-4.4bit"
    with pytest.raises(ValueError, match=r"budget must be at least 1\.4\d\d bits .* got 1\.3"):
        build(model, parts, 1.3, tokens=300)


def test_layers_that_matter_get_more(model):
    codecs = {s: {n: presets.codec(n, 64, s) for n in TRELLIS} for s in ("key", "value")}

    def part(layer, side, kl):
        errors = dict(zip(TRELLIS, (1, 0.3, 0.08, 0.02), strict=True))
        return Part(layer, side, codecs[side], {"trellis": kl}, errors)

    parts = [part(0, "key", 1.0), part(0, "value", 0.1), part(1, "key", 1.0), part(1, "value", 0)]
    made = build(model, parts, 2.8, tokens=300)
    assert [x.key.bits for x in made.layers] == [3, 3]
    assert [x.value.bits for x in made.layers] == [2, 1]
    assert made.layers[0].key is made.layers[1].key  # tables are shared


def test_file(model, parts, tmp_path):
    made, path = build(model, parts, 2.6, tokens=300), tmp_path / "mixed.safetensors"
    made.save(path)
    read = Calibration.load(path)
    assert (read.preset, read.shape, read.tokens) == ("mixed-2.6bit", made.shape, 300)
    for one, two in zip(made.layers, read.layers, strict=True):
        assert one.key.fingerprint == two.key.fingerprint
        assert one.value.fingerprint == two.value.fingerprint
    caches = make_prompt_cache(model, path)
    logits = tiny.run(model, caches, tiny.ids(200), [150, 50])
    again = tiny.run(model, make_prompt_cache(model, made), tiny.ids(200), [200])
    assert mx.allclose(logits, again, atol=1e-4)
    assert [c.key_codec.name for c in caches] == [x.key.name for x in made.layers]
    arrays, meta = mx.load(str(path), return_metadata=True)
    for bad, message in (
        ('[["a", "b"]]', "known presets .*'a', 'b'"),
        ("[1]", "must hold a whole calibration"),
        ('[["none", "none"]]', "must hold a whole calibration"),
    ):
        mx.save_safetensors(str(path), arrays, meta | {"codecs": bad})
        with pytest.raises(ValueError, match=message):
            Calibration.load(path)


def test_ranks_share_presets(model, parts):
    """Presets serve any heads, so a rank takes the codecs as they are, with fewer heads."""
    made = build(model, parts, 2.6, tokens=300)
    part = sharding._heads(made, 1, 2)
    assert part.shape.kv_heads == 1 and part.layers == made.layers


def test_bad_arguments(model):
    with pytest.raises(ValueError, match="candidates must be of .*, but got vecinfer-2bit"):
        allocate(model, tiny.ids(300), 2.5, candidates=["vecinfer-2bit"])
    with pytest.raises(ValueError, match="but got none"):
        allocate(model, tiny.ids(300), 2.5, candidates=[])
    with pytest.raises(ValueError, match="tokens must be at least 256, but got 9"):
        allocate(model, tiny.ids(9), 2.5)


def test_command(tmp_path, capsys):
    folder, target = str(save_model(tmp_path / "tiny")), tmp_path / "c.safetensors"
    command = ["calibrate", folder, "builtin", "-o", str(target)]
    few = ["--tokens", "256", "--candidates", "trellis-2bit", "centred-4bit"]
    assert cli.main([*command, "--budget", "3.5", *few]) == 0
    shown = capsys.readouterr().out
    assert "mixed-3.5bit for 2 layers" in shown and "keys" in shown
    names = {c.name for x in Calibration.load(target).layers for c in (x.key, x.value)}
    assert names == {"trellis-2bit", "centred-4bit"}
    target.unlink()
    assert "must be at least 2.4" in fails(capsys, *command, "--budget", "2", *few)
    assert "must be between 0 and 16" in fails(capsys, *command, "--budget", "0")
    both = fails(capsys, *command, "--budget", "3", "--preset", "vecinfer-2bit")
    assert "not allowed with" in both and not target.exists()
