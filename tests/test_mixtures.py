"""Mixtures with query-aware keys: how they are measured, and all that a calibration works with."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator

import tiny
import writing
from oracle import f64
from test_cases_batch import finish
from test_cli import fails, save_model
from test_query_aware import pair_weights, watched
from vqkv_ext import cli
from vqkv_ext.adapters import allocate as module
from vqkv_ext.adapters import sharding
from vqkv_ext.adapters.allocate import Part, allocate, build, default_candidates, measure
from vqkv_ext.adapters.mlx_lm import make_prompt_cache, model_shape
from vqkv_ext.adapters.query_statistics import LayerStatistics, key_factors, statistics
from vqkv_ext.adapters.serialization import load_prompt_cache, save_prompt_cache
from vqkv_ext.codecs import Calibration, LayerCodecs, presets, query_aware
from vqkv_ext.config import KVCacheBuilder, KVCacheConfig
from vqkv_ext.evaluation import compare

AWARE = tuple(query_aware.PRESETS)
TEXT = tiny.ids(300, seed=5)


@pytest.fixture(scope="module")
def model():
    return writing.llama()


@pytest.fixture(scope="module")
def parts(model) -> list[Part]:
    return measure(model, TEXT, AWARE)


@pytest.fixture(scope="module")
def mixture(model) -> Calibration:
    """Layers of keys and values that differ in kind and size."""
    factors = key_factors(model, TEXT)
    layers = [
        LayerCodecs(
            query_aware.key_codec("query-aware-3bit", factors[0]),
            presets.codec("trellis-1bit", 64, "value"),
        ),
        LayerCodecs(
            presets.codec("trellis-4bit", 64, "key"), presets.codec("centred-2bit", 64, "value")
        ),
    ]
    return Calibration("mixed-2.5bit", model_shape(model), layers, len(TEXT))


def test_options_are_fitted_to_their_layer(model, parts):
    factors = key_factors(model, TEXT)
    for part in parts:
        names = AWARE if part.side == "key" else [f"trellis-{b}bit" for b in (1, 2, 3, 4)]
        assert list(part.codecs) == list(names)
        if part.side == "key":
            for name, codec in part.codecs.items():
                want = query_aware.key_codec(name, factors[part.layer])
                assert codec.fingerprint == want.fingerprint
        errors = list(part.errors.values())
        assert errors[0] == 1 and errors == sorted(errors, reverse=True) and errors[3] < 0.05
    assert parts[0].codecs[AWARE[0]].fingerprint != parts[2].codecs[AWARE[0]].fingerprint
    assert parts[1].codecs["trellis-1bit"] is parts[3].codecs["trellis-1bit"]


def test_each_method_is_measured_by_its_coarsest(model):
    """Both ways to code keys; values of both are trellis codes, measured once."""
    parts = measure(model, TEXT, ["trellis-3bit", "query-aware-2bit", "query-aware-1bit"])
    none = {"key": "none", "value": "none"}
    for part in parts:
        coarsest = {"query-aware": "query-aware-1bit", "trellis": "trellis-3bit"}
        if part.side == "value":
            coarsest = {"trellis": "trellis-1bit"}
        assert part.kl.keys() == coarsest.keys()
        for method, name in coarsest.items():
            assert part.errors[name] == 1 and part.loss(name) == part.kl[method] > 0
            layers = {part.layer: {**none, part.side: part.codecs[name]}, 1 - part.layer: none}
            make = lambda layers=layers: KVCacheBuilder.for_model(  # noqa: E731
                model, KVCacheConfig(per_layer=layers)
            )
            (found,) = compare(model, TEXT, {"x": make}, chunk=128, skip=module._UNCODED).values()
            assert part.kl[method] == pytest.approx(found.kl, rel=0.02)
    made = build(model, parts, 3.5, tokens=300)
    assert {x.key.name for x in made.layers} <= {"trellis-3bit", "query-aware-2bit"}


def test_error_of_keys_is_that_of_scores(model):
    """Against every pair of a query and a key, in float64."""
    layer, q = statistics(model, TEXT)[0], watched(model, TEXT)[0][0]
    q, k, v = f64(q).reshape(2, 2, len(TEXT), 64), f64(layer.keys), f64(layer.values)
    weights = pair_weights(q, k, v)
    for name in ("turboquant-3bit", "trellis-1bit", "query-aware-2bit"):
        if name in query_aware.PRESETS:
            codec = query_aware.key_codec(name, layer.factors())
        else:
            codec = presets.codec(name, 64, "key")
        coded = slice(4, 260)  # whole blocks after the sinks
        error = f64(codec.decode(codec.encode(layer.keys[None, :, coded])))[0] - k[:, coded]
        scores = np.einsum("hgtd,hnd->hgtn", q, error)
        weight = weights[..., coded]
        want = (weight * scores**2).sum()
        assert layer.score_error(codec) == pytest.approx(want, rel=0.25)


def test_channels_without_queries_cost_nothing(rng):
    """Keys whose large channels no query asks for: query-aware codes are the better ones."""
    keys = rng.standard_normal((1, 260, 64))
    keys[..., :8] *= 20
    queries = np.ones((1, 64))
    queries[:, :8] = 1e-4
    layer = uniform(keys, queries)
    aware = query_aware.key_codec("query-aware-2bit", layer.factors())
    plain = presets.codec("trellis-2bit", 64, "key")
    assert layer.score_error(aware) < 0.1 * layer.score_error(plain)


def uniform(keys: np.ndarray, queries: np.ndarray) -> LayerStatistics:
    """Of keys ``[H, N, D]`` and squares of queries ``[H, D]``, all pairs of equal weight."""
    k = mx.array(keys.astype(np.float32))
    return LayerStatistics(k, k, mx.ones(k.shape[:2]), mx.array(queries.astype(np.float32)))


def test_budget(model, parts, tmp_path):
    made = build(model, parts, 2.6, tokens=300)
    pairs = [(x.key, x.value) for x in made.layers]
    stored = 8 * sum(k.bytes_per_token + v.bytes_per_token for k, v in pairs) / 256
    assert 2.6 - 1 / 4 < stored <= 2.6
    assert all(k.name in AWARE and v.name.startswith("trellis") for k, v in pairs)
    made.save(tmp_path / "m.safetensors")
    check_equal(made, Calibration.load(tmp_path / "m.safetensors"))


def check_equal(one: Calibration, two: Calibration) -> None:
    assert (one.preset, one.shape, one.tokens) == (two.preset, two.shape, two.tokens)
    for a, b in zip(one.layers, two.layers, strict=True):
        assert a.key.fingerprint == b.key.fingerprint
        assert a.value.fingerprint == b.value.fingerprint


def test_file(mixture, tmp_path):
    path = tmp_path / "m.safetensors"
    mixture.save(path)
    check_equal(mixture, Calibration.load(path))
    arrays, meta = mx.load(str(path), return_metadata=True)
    mx.eval(arrays)
    assert list(arrays) == ["layers.0.key.smooth"]
    rest = '["trellis-4bit", "centred-2bit"]'
    for pair, message in (
        ('["trellis-1bit", "query-aware-3bit"]', "values must .* keys' query-aware-3bit"),
        ('["query-aware-3bit", "query-aware-3bit"]', "values must .* keys' query-aware-3bit"),
        ('["query-aware-3bit", "vecinfer-2bit"]', "must have the same VecInfer preset or none"),
        ('["vecinfer-1bit", "vecinfer-2bit"]', "the same .* got vecinfer-1bit and vecinfer-2bit"),
        ('["query-aware-5bit", "trellis-1bit"]', "known presets .* got 'query-aware-5bit'"),
        ("[3, null]", "known presets .* got '3', 'None'"),
    ):
        mx.save_safetensors(str(path), arrays, meta | {"codecs": f"[{pair}, {rest}]"})
        with pytest.raises(ValueError, match=f"must hold a whole calibration.*{message}"):
            Calibration.load(path)
    for bad, message in (
        ({}, "layers.0.key.smooth"),
        ({"layers.0.key.smooth": mx.ones((1, 64))}, r"key.smooth must be finite of shape \(2, 64"),
        ({"layers.0.key.smooth": mx.zeros((2, 64))}, "key.smooth must be positive"),
    ):
        mx.save_safetensors(str(path), bad, meta)
        with pytest.raises(ValueError, match=f"must hold a whole calibration.*{message}"):
            Calibration.load(path)


def test_what_no_file_can_hold(mixture, tmp_path):
    path = tmp_path / "m.safetensors"
    aware, plain = mixture.layers
    fitted = tiny.calibration().layers[0]
    for pair, message in (
        (LayerCodecs(plain.key, aware.key), "values must have another codec than the keys' query"),
        (LayerCodecs(aware.key, fitted.value), "got query-aware-3bit and vecinfer-2bit"),
        (LayerCodecs(fitted.key, plain.value), "got vecinfer-2bit and centred-2bit"),
    ):
        broken = Calibration("mixed", mixture.shape, [pair, plain], 300)
        with pytest.raises(ValueError, match=rf"\[Calibration\] .*{message}"):
            broken.save(path)
        assert not path.exists()


def test_cache_in_chunks_and_in_files(model, mixture, tmp_path):
    """The same codes in any chunking; a saved cache goes on as the one that was saved."""
    tokens, after = tiny.ids(220), tiny.ids(90, seed=2)
    made = [make_prompt_cache(model, mixture) for _ in range(2)]
    one = tiny.run(model, made[0], tokens)
    two = tiny.run(model, made[1], tokens, [1, 99, 120])
    assert mx.allclose(one, two, atol=1e-3)
    for a, b, layer in zip(*made, mixture.layers, strict=True):
        assert a.coded_tokens == 128 and a.key_codec is layer.key and a.value_codec is layer.value
        for x, y in zip(a._bodies, b._bodies, strict=True):
            assert mx.array_equal(x["codes"][:, :, :128], y["codes"][:, :, :128])
    path = str(tmp_path / "cache.safetensors")
    save_prompt_cache(path, made[0])
    back, _ = load_prompt_cache(path, model, like=made[1])
    assert [c.fingerprint for c in back] == [c.fingerprint for c in made[0]]
    assert mx.array_equal(tiny.run(model, back, after), tiny.run(model, made[0], after))
    other = make_prompt_cache(model, "trellis-2bit")
    with pytest.raises(ValueError, match="query-aware-3bit"):
        load_prompt_cache(path, model, like=other)


def test_rows_of_a_batch_are_their_single_runs(model, mixture):
    prompts = [tiny.ids(n, seed=n) for n in (216, 3, 140)]
    want = [writing.greedy(model, p, make_prompt_cache(model, mixture), 6)[0] for p in prompts]
    batch = BatchGenerator(model, max_tokens=6)
    uids = batch.insert(prompts, caches=[make_prompt_cache(model, mixture) for _ in prompts])
    found, back = finish(batch)
    assert [found[u] for u in uids] == want
    assert [c.key_codec.name for c in back[uids[0]]] == ["query-aware-3bit", "trellis-4bit"]


def test_ranks(mixture):
    """A rank's heads of what is fitted; presets as they are. Layers keep their own."""
    smooth = mixture.layers[0].key.transform.diagonal
    for rank in (0, 1):
        part = sharding._heads(mixture, rank, 2)
        assert part.shape.kv_heads == 1 and part.layers[1] == mixture.layers[1]
        assert mx.array_equal(part.layers[0].key.transform.diagonal, smooth[rank : rank + 1])
        assert part.layers[0].value is mixture.layers[0].value
        assert sharding._layers(mixture, rank, rank + 1).layers == [mixture.layers[rank]]


def test_errors(model):
    odd = writing.llama(head_dim=72)
    assert default_candidates(model_shape(model)) == tuple(AWARE)
    assert default_candidates(model_shape(odd)) == tuple(f"trellis-{b}bit" for b in (1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"\[query-aware-2bit\] head_dim must be .* got 72"):
        allocate(odd, TEXT, 2.5, candidates=["query-aware-2bit"])
    with pytest.raises(ValueError, match=r"at least 1\.4\d\d bits .* query-aware-1bit.* got 1\.3"):
        allocate(model, TEXT, 1.3, candidates=AWARE)
    with pytest.raises(ValueError, match="tokens must be at least 256, but got 9"):
        allocate(model, tiny.ids(9), 2.5, candidates=AWARE)


def test_command(tmp_path, capsys):
    folder, target = str(save_model(tmp_path / "tiny")), tmp_path / "c.safetensors"
    command = ["calibrate", folder, "builtin", "-o", str(target), "--tokens", "256"]
    some = ["--candidates", "query-aware-1bit", "query-aware-3bit", "centred-2bit"]
    assert cli.main([*command, "--budget", "2.6", *some]) == 0
    assert "mixed-2.6bit for 2 layers" in capsys.readouterr().out
    layers = Calibration.load(target).layers
    assert {x.key.name for x in layers} <= {"query-aware-1bit", "query-aware-3bit", "centred-2bit"}
    target.unlink()
    assert "must be at least 1.4" in fails(capsys, *command, "--budget", "1", *some)
    wrong = fails(capsys, *command, "--budget", "3", "--candidates", "vecinfer-2bit")
    assert "--candidates: invalid choice" in wrong and not target.exists()
