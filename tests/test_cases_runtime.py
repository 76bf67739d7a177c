"""Threads, compiled attention, bytes, and imports: cases T25, T26, T27 and T32."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as stock

import tiny
from test_cache import SMALL, codecs, feed, tokens
from test_cases_cache import HERE, coded, script
from vqkv_ext import ops
from vqkv_ext.adapters.mlx_lm import disable_attention, make_prompt_cache
from vqkv_ext.cache import CompressedKVCache
from vqkv_ext.packed import Layout, PackedKV

pytestmark = pytest.mark.usefixtures("one_blas_thread")


# ---- T25 ----

THREADS = """
import sys, threading, mlx.core as mx, tiny
from vqkv_ext.adapters.mlx_lm import make_prompt_cache
m = tiny.llama(tied=False)
def decode(cache):
    try:
        found, token = [], 5
        for _ in range(12):
            out = m(mx.array([[token]]), cache=cache)
            token = int(mx.argmax(out[0, -1]))
            found.append(token)
        print(found, cache[0].coded_tokens, flush=True)
    except RuntimeError as e:
        print("RuntimeError", e, flush=True)
for config, n in ((tiny.SMALL, 40), (tiny.DEFAULT, 480)):
    for evaluated in (True, False):
        cache = make_prompt_cache(m, "centred-2bit", config=config)
        mx.eval(m(mx.array(tiny.ids(n))[None], cache=cache))
        if evaluated:
            mx.eval([c.state for c in cache])
        worker = threading.Thread(target=decode, args=(cache,))
        worker.start()
        worker.join()
"""


def test_t25_prefill_and_decode_on_two_threads(model):
    """As on one thread, whether the state was evaluated or only the logits."""
    want = []
    for config, n in ((tiny.SMALL, 40), (tiny.DEFAULT, 480)):
        cache = make_prompt_cache(model, "centred-2bit", config=config)
        tiny.run(model, cache, tiny.ids(n))
        found, token = [], 5
        for _ in range(12):
            token = int(mx.argmax(model(mx.array([[token]]), cache=cache)[0, -1]))
            found.append(token)
        assert len(set(found)) > 3 and min(coded(cache)) > 0
        want += [f"{found} {cache[0].coded_tokens}"] * 2
    assert script(THREADS) == want


# ---- T26 ----


def test_t26_compiled_attention_is_never_stale(rng):
    """Arrays of fixed capacity, lengths as data: one trace serves S = 1 to 40."""
    pair = codecs(rng)
    cache = CompressedKVCache(*pair, SMALL)
    kv, q = tokens(rng, 64), mx.array(rng.standard_normal((1, 4, 1, 64)).astype(np.float32))
    feed(cache, kv, [64])
    bodies = [c.encode(x[:, :, 2:])["codes"] for c, x in zip(pair, kv, strict=True)]
    traces = 0

    def attend(q, rows, k_tail, v_tail, k_codes, v_codes):
        nonlocal traces
        traces += 1
        layout = Layout(rows, 2, 8, 8)
        k = PackedKV(pair[0].body({"codes": k_codes}), k_tail, layout)
        v = PackedKV(pair[1].body({"codes": v_codes}), v_tail, layout)
        return ops.attention(q, k, v, scale=0.2)

    compiled = mx.compile(attend)
    outputs = []
    for s in range(1, 41):
        rows = mx.array([[s, SMALL.coded_tokens(s), 2]], dtype=mx.int32)
        got = compiled(q, rows, *kv, *bodies)
        before = traces
        assert mx.array_equal(got, attend(q, rows, *kv, *bodies)), s
        traces = before
        fresh = CompressedKVCache(*pair, SMALL)
        feed(fresh, [x[:, :, :s] for x in kv], [s])
        k, v = fresh.keys_and_values()
        assert mx.abs(got - ops.attention(q, k.packed, v.packed, scale=0.2)).max() < 1e-5, s
        outputs.append(np.array(got))
    assert traces == 1
    assert all(not np.array_equal(a, b) for a, b in zip(outputs, outputs[1:], strict=False))


# ---- T27 ----


def arrays_of(x, found: dict[int, mx.array], skip: set[int]) -> dict[int, mx.array]:
    """All arrays reachable from an object, but not through `skip`."""
    if id(x) in skip:
        return found
    if isinstance(x, mx.array):
        found[id(x)] = x
    elif isinstance(x, dict):
        for v in x.values():
            arrays_of(v, found, skip)
    elif isinstance(x, (list, tuple)):
        for v in x:
            arrays_of(v, found, skip)
    elif hasattr(x, "__dict__"):
        arrays_of(vars(x), found, skip)
    return found


def test_t27_bytes_and_memory():
    """4096 ids in chunks of 512, 8 query and 2 KV heads."""
    model = tiny.llama(heads=8)
    ids = mx.array(tiny.ids(4096))
    peak = {}
    for kind in ("stock", "ours"):
        if kind == "ours":
            cache = make_prompt_cache(model, "centred-4bit")
        else:
            cache = stock.make_prompt_cache(model)
        mx.synchronize()
        gc.collect()  # what other tests left
        mx.clear_cache()
        base = mx.get_active_memory()
        mx.reset_peak_memory()
        for at in range(0, 4096, 512):
            mx.eval(model(ids[None, at : at + 512], cache=cache), [c.state for c in cache])
        peak[kind] = mx.get_peak_memory() - base
        if kind == "ours":
            for c in cache:
                # a reader's arrays are other names of the same memory
                held = arrays_of(c, {}, {id(x) for x in (c.key_codec, c.value_codec, c._reader)})
                assert c.nbytes == sum(a.nbytes for a in held.values())
                windows = sum(t.nbytes for t in c._tails)
                capacity = c._bodies[0]["codes"].shape[2]
                assert abs((c.nbytes - windows) / capacity / c.bytes_per_token - 1) < 0.05
                assert c.coded_tokens == c.config.coded_tokens(4096) > 0
        del cache
        if kind == "ours":
            del c, held
        mx.clear_cache()
        assert abs(mx.get_active_memory() - base) < 65536
    disable_attention(model)
    assert peak["ours"] <= peak["stock"]


# ---- T32 ----


def test_t32_without_metal_and_with_another_mlx():
    """An import without Metal says in one line what computes; another mlx is refused."""
    code = """
import mlx.core as mx, vqkv_ext
from vqkv_ext import ops
print(vqkv_ext.info()["executor"], mx.metal.is_available())
codes = ops.quantize_vq(mx.zeros((1, 2, 3, 8)), mx.zeros((256, 4)))
print(codes.shape, codes.dtype)
"""
    env = {k: v for k, v in os.environ.items() if k != "VQKV_EXECUTOR"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=HERE
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and done.stderr == "" and len(lines) == 2
    assert lines[1] == f"(1, 2, 3, 2) {mx.uint8}"
    if not mx.metal.is_available() and mx.default_device() == mx.cpu:
        assert lines[0] == "cpu False"
    fake = "import mlx.core as mx; mx.__version__ = '0.1.2'; import vqkv_ext"
    done = subprocess.run([sys.executable, "-c", fake], capture_output=True, text=True, env=env)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ImportError")
    assert "0.1.2" in last and mx.__version__ in last
