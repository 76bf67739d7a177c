"""Case T18: caches in files, in this process and in a new one, with presets and with codebooks."""

from __future__ import annotations

import pickle

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as stock

import tiny
from test_cache import SMALL, codecs, codes, feed, same, tokens
from test_cases_cache import WHICH, coded, exempt, greedy, script
from vqkv_ext.adapters.mlx_lm import disable_attention, make_prompt_cache
from vqkv_ext.adapters.serialization import load_prompt_cache, save_prompt_cache
from vqkv_ext.cache import CacheConfig, CompressedKVCache
from vqkv_ext.codecs import presets

pytestmark = pytest.mark.usefixtures("one_blas_thread")


CONTINUE = """
import sys, mlx.core as mx, tiny
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as stock
from vqkv_ext.adapters.mlx_lm import enable_attention
from vqkv_ext.adapters.serialization import load_prompt_cache
own = sys.argv[1] == "own"
for path in sys.argv[2:]:
    cache = load_prompt_cache(path)[0] if own else stock.load_prompt_cache(path)
    m = tiny.llama(layers=len(cache), tied=False)
    enable_attention(m)
    print([c.offset for c in cache], [type(c).__name__ for c in cache])
    print(cache[1]._tails[0].dtype, cache[1].coded_tokens)
    found = list(generate_step(mx.array([7]), m, max_tokens=5, prompt_cache=cache))
    print([int(t) for t, _ in found])
    print("".join(bytes(memoryview(p.astype(mx.float32))).hex() for _, p in found))
"""


@pytest.mark.parametrize("reader", ["own", "mlx_lm"])
def test_t18_a_new_process_continues_bitwise(tmp_path, reader):
    """Calibrated codecs, and a preset in a list with stock layers."""
    paths, want = [], []
    for which, (config, factor) in WHICH.items():
        for mixed in (False, True):
            n = 20 * factor
            m = tiny.llama(layers=3 if mixed else 2, tied=False)
            cache = exempt(m, config) if mixed else tiny.compressed(m, config)
            tiny.run(m, cache, tiny.ids(n))
            assert min(coded(cache)) > 0
            paths.append(str(tmp_path / f"{which} {mixed}.safetensors"))
            (save_prompt_cache if reader == "own" else stock.save_prompt_cache)(paths[-1], cache)
            want += [
                f"{[n] * len(cache)} {[type(c).__name__ for c in cache]}",
                f"{mx.float32} {cache[1].coded_tokens}",
            ]
            found = list(generate_step(mx.array([7]), m, max_tokens=5, prompt_cache=cache))
            want += [
                str([int(t) for t, _ in found]),
                "".join(bytes(memoryview(p.astype(mx.float32))).hex() for _, p in found),
            ]
            disable_attention(m)
    assert script(CONTINUE, reader, *paths) == want


def test_t18_without_the_adapter_the_class_is_named(model, tmp_path):
    path = tmp_path / "cache.safetensors"
    cache = tiny.compressed(model)
    tiny.run(model, cache, tiny.ids(20))
    save_prompt_cache(path, cache)
    code = f"""
from mlx_lm.models.cache import load_prompt_cache
try:
    load_prompt_cache({str(path)!r})
except KeyError as e:
    print(repr(e))
import vqkv_ext.adapters.mlx_lm
print([type(c).__module__ for c in load_prompt_cache({str(path)!r})])
"""
    assert script(code) == ["KeyError('CompressedKVCache')", "['vqkv_ext.cache', 'vqkv_ext.cache']"]


@pytest.mark.parametrize("preset", [*presets.PRESETS])
def test_t18_every_preset_round_trips(tmp_path, rng, preset):
    pair = [presets.codec(preset, 64, side) for side in ("key", "value")]
    cache = CompressedKVCache(*pair, SMALL)
    kv, q = tokens(rng, 60), mx.array(rng.standard_normal((1, 4, 60, 64)).astype(np.float32))
    feed(cache, [x[:, :, :40] for x in kv], [40])
    path = tmp_path / "cache.safetensors"
    save_prompt_cache(path, [cache], {"model": "tiny"})
    (again,), metadata = load_prompt_cache(path)
    assert metadata == {"model": "tiny"} and again.fingerprint == cache.fingerprint
    assert again.coded_tokens == cache.coded_tokens > 0 and again.config == cache.config
    rest = [x[:, :, 40:] for x in kv]
    want = feed(cache, rest, [20], q[:, :, 40:])
    assert mx.array_equal(feed(again, rest, [20], q[:, :, 40:]), want)
    assert same(codes(cache), codes(again))


def test_t18_empty_caches_and_lists(model, tmp_path):
    path = tmp_path / "cache.safetensors"
    for cache in ([], tiny.compressed(model), [stock.KVCache(), tiny.compressed(model)[1]]):
        save_prompt_cache(path, cache)
        again, metadata = load_prompt_cache(path, model)
        assert [type(c) for c in again] == [type(c) for c in cache] and metadata == {}
        assert all(c.empty() and c.nbytes == 0 and c.offset == 0 for c in again)
        assert all(a.config == b.config for a, b in zip(again, cache) if hasattr(b, "config"))  # noqa: B905
    save_prompt_cache(path, tiny.compressed(model))
    again, _ = load_prompt_cache(path)
    want = greedy(model, tiny.compressed(model), tiny.ids(40), 5)
    assert greedy(model, again, tiny.ids(40), 5) == want and min(coded(again)) > 0


def test_t18_what_does_not_fit_is_refused(model, tmp_path, rng):
    path = tmp_path / "cache.safetensors"
    make = lambda preset, config=SMALL: make_prompt_cache(model, preset, config=config)  # noqa: E731
    cache = make("centred-2bit")
    tiny.run(model, cache, tiny.ids(20))
    save_prompt_cache(path, cache)
    other = CacheConfig(2, 8, 16)
    for like, message in (
        (make("centred-4bit"), "layer 0 .* must have fingerprint 'centred-4bit:.*'centred-2bit:"),
        (tiny.compressed(model), "must have fingerprint 'vecinfer-2bit:"),
        (make("centred-2bit", other), r"must have windows \(2, 8, 16, .* got \(2, 8, 8,"),
        (make("centred-2bit")[:1], "must hold 1 layers, but got 2"),
        (stock.make_prompt_cache(model), "must be a KVCache, but got a CompressedKVCache"),
    ):
        with pytest.raises(ValueError, match=r"\[load_prompt_cache\] .*" + message):
            load_prompt_cache(path, like=like)
    again, _ = load_prompt_cache(path, model, like=make("centred-2bit"))
    assert all(same(codes(a), codes(b)) for a, b in zip(again, cache, strict=True))
    with pytest.raises(ValueError, match="must be of codec 'centred-4bit:"):
        make("centred-4bit")[0].state = cache[0].state
    # another codebook of the same name and size
    pair = codecs(rng)
    one = CompressedKVCache(*pair, SMALL)
    feed(one, tokens(rng, 30), [30])
    with pytest.raises(ValueError, match="must be of codec"):
        CompressedKVCache.from_state(one.state, *codecs(np.random.default_rng(1)))
    lie = list(one.state)
    recipe = list(lie[4][0])
    lie[4] = (("vecinfer-test:0000000000000000", *recipe[1:]), lie[4][1])
    with pytest.raises(ValueError, match="must have the fingerprint 'vecinfer-test:0000"):
        CompressedKVCache.from_state(tuple(lie))
    lie[4] = (("mine:1", "mine", 64, None, None), lie[4][1])
    with pytest.raises(ValueError, match=r"must be one of a preset or a product code, but got 'mi"):
        CompressedKVCache.from_state(tuple(lie))


def test_t18_damaged_files_are_refused(model, tmp_path):
    path = tmp_path / "cache.safetensors"
    cache = tiny.compressed(model)
    tiny.run(model, cache, tiny.ids(20))
    save_prompt_cache(path, cache)
    whole = path.read_bytes()
    for cut in (3, 100, len(whole) - 50):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"\[load_prompt_cache\] .* must be"):
            load_prompt_cache(path)
    path.write_bytes(whole)
    arrays, meta = mx.load(str(path), return_metadata=True)
    mx.eval(arrays)
    for place in ("0.2.1", "0.4.1.0"):  # of a count and of a codec's name
        less = {key: value for key, value in meta.items() if value != place}
        mx.save_safetensors(str(path), arrays, less)
        with pytest.raises(ValueError, match=r"\[load_prompt_cache\] .* must be complete"):
            load_prompt_cache(path)
    mx.save_safetensors(str(path), {"a": mx.zeros(3)})
    with pytest.raises(ValueError, match="must be written by save_prompt_cache"):
        load_prompt_cache(path)
    with pytest.raises(FileNotFoundError, match="must be a file, but"):
        load_prompt_cache(tmp_path / "nothing.safetensors")
    with pytest.raises(ValueError, match="must end in .safetensors"):
        save_prompt_cache(tmp_path / "cache.npz", cache)

    class Foreign(stock.KVCache):
        pass

    save_prompt_cache(path, [Foreign()])
    with pytest.raises(ValueError, match="caches of mlx_lm or vqkv_ext, but got Foreign"):
        load_prompt_cache(path)


def test_attributes_can_be_copied_and_pickled(rng):
    for preset in ("centred-2bit", "none", "qjl-2bit"):
        pair = [presets.codec(preset, 64, side) for side in ("key", "value")]
        cache = CompressedKVCache(*pair, SMALL)
        feed(cache, tokens(rng, 40), [40])
        for one in (cache, cache.merge([cache])):
            again = pickle.loads(pickle.dumps(one))
            assert again.size() == 40 and again.fingerprint == cache.fingerprint
            assert same(codes(again), codes(one)) if one is cache else again.coded_tokens == [24]
