"""Correct kernels run, in every thread order and at odd sizes, and give what numpy gives."""

from __future__ import annotations

import math
import os
import struct
import threading

import numpy as np
import pytest
from simulator_library import Simulator, SimulatorError

DTYPES = ("float32", "float16", "bfloat16")
TOLERANCE = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}


@pytest.fixture(scope="session")
def sim(request: pytest.FixtureRequest) -> Simulator:
    """The library of the environment (the sanitizer test sets it), else a fresh build."""
    if path := os.environ.get("VQKV_TEST_SIMULATOR"):
        return Simulator(path)
    return Simulator(request.getfixturevalue("library"))


def params(n: int, scale: float = 1.0) -> bytes:
    return struct.pack("If", n, scale)


def encode(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values as a kernel reads them; bfloat16 as its bits."""
    x = np.ascontiguousarray(x, np.float32)
    if dtype != "bfloat16":
        return x.astype(dtype)
    u = x.view(np.uint32).astype(np.uint64)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def decode(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype != "bfloat16":
        return x.astype(np.float32)
    return (x.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [256, 40])
@pytest.mark.parametrize("n", [1, 39, 256, 777])
def test_sum(sim: Simulator, dtype: str, threads: int, n: int) -> None:
    x = encode(np.random.default_rng(n).uniform(0, 1, n), dtype)
    groups = math.ceil(n / threads)
    out = encode(np.zeros(groups), dtype)
    sim.run(f"good_sum_{dtype}_{threads}", [x], [out], params(n, 0.5), [groups], threads)
    values = decode(x, dtype).astype(np.float64)
    want = [values[i : i + threads].sum() / 2 for i in range(0, n, threads)]
    np.testing.assert_allclose(decode(out, dtype), want, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 96, 1000])
def test_reverse(sim: Simulator, dtype: str, n: int) -> None:
    x = encode(np.arange(n) % 100, dtype)
    out = np.zeros_like(x)
    sim.run(f"good_reverse_{dtype}", [x], [out], params(n), [math.ceil(n / 96)], 96)
    want = np.concatenate([x[i : i + 96][::-1] for i in range(0, n, 96)])
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "uint8"])
def test_simd(sim: Simulator, dtype: str) -> None:
    x = np.random.default_rng(1).permutation(np.arange(1, 33)) % 8
    x = x.astype(dtype)
    out = np.zeros((9, 32), dtype)
    sim.run(f"good_simd_{dtype}", [x], [out], params(32), [1], 32)
    lane = np.arange(32)
    rows = [np.full(32, f) for f in (x.sum(), x.max(), x.min())]
    rows += [x[::-1], x[lane ^ 5], x[np.maximum(lane - 1, 0)], x[np.minimum(lane + 1, 31)]]
    rows += [np.full(32, x[3]), np.full(32, 116)]
    np.testing.assert_array_equal(out, np.stack(rows).astype(dtype))


def test_math(sim: Simulator) -> None:
    special = [0.0, -0.0, 1.0, 0.5, 1.5, 2.5, -0.5, np.inf, -np.inf, np.nan, 1e-30, 1e30]
    x = np.array(special + list(np.linspace(-5, 5, 87)), np.float32)
    out = np.zeros((20, x.size), np.float32)
    sim.run("good_math", [x], [out], params(x.size, 0.25), [2], 64)
    with np.errstate(all="ignore"):
        d = x.astype(np.float64)
        half_away = np.where(np.isfinite(d), np.trunc(d + np.copysign(0.5, d)), d)
        want = [np.exp(d), np.exp2(d), np.log(d), np.log2(d), np.sqrt(d), 1 / np.sqrt(d)]
        want += [np.floor(d), np.ceil(d), np.rint(d), half_away, np.abs(d), d * d + 0.25]
        want += [d, np.fmax(d, 1.5), np.fmin(np.fmax(d, -1), 1), np.where(d > 2, -d, d)]
        want += [np.isnan(d), np.isfinite(d)]
        bits = x.view(np.uint32)
        want += [[32 - int(b).bit_length() for b in bits]]
        want += [np.resize([0.5, 1.0, 2.0, 4.0], x.size)]
        want = np.stack([np.asarray(w, np.float64) for w in want]).astype(np.float32)
    np.testing.assert_allclose(out, want, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 63, 130])
def test_vectors(sim: Simulator, dtype: str, n: int) -> None:
    rng = np.random.default_rng(n)
    x = encode(rng.standard_normal((n, 4)), dtype)
    q = rng.integers(-128, 128, (n, 4), dtype=np.int8)
    out, wide = np.zeros_like(x), np.zeros((n, 4), np.float32)
    sim.run(f"good_vectors_{dtype}", [x, q], [out, wide], params(n, 3.0), [math.ceil(n / 64)], 64)
    v = decode(x, dtype)
    want = v * q + np.float32(3)
    want[:, 0] += (v * q).sum(1)
    np.testing.assert_allclose(wide, want, rtol=1e-5, atol=1e-3)
    np.testing.assert_array_equal(out, encode(wide, dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_conversions(sim: Simulator, dtype: str) -> None:
    """All 16-bit values survive, and rounding ties go to even."""
    every = np.arange(1 << 16, dtype=np.uint16)
    finite = every if dtype == "bfloat16" else every.view(np.float16)
    v = decode(finite, dtype)
    keep = np.isfinite(v)
    x = finite[keep]
    x = x[: x.size // 4 * 4].reshape(-1, 4)
    n = len(x)
    out, wide = np.zeros_like(x), np.zeros((n, 4), np.float32)
    q = np.ones((n, 4), np.int8)
    sim.run(f"good_vectors_{dtype}", [x, q], [out, wide], params(n, 0.0), [n // 64 + 1], 64)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out, encode(wide, dtype))
    np.testing.assert_array_equal(wide[:, 1:], decode(x, dtype)[:, 1:])


def test_empty_buffer_and_partial_output(sim: Simulator) -> None:
    unread, out = np.zeros(0, np.float32), np.full(12, -7, np.int32)
    sim.launch("good_partial", [unread, out], params(5), [1, 5, 2], 32)
    np.testing.assert_array_equal(out, [*range(10), -7, -7])


@pytest.mark.parametrize("grid", [(0, 1, 1), (3, 0, 1), (1, 1, 0)])
def test_empty_grid(sim: Simulator, grid: tuple[int, ...]) -> None:
    out = np.full(3, -7, np.int32)
    sim.launch("good_partial", [out, out], params(3), grid, 32)
    assert (out == -7).all()


def test_inputs_stay(sim: Simulator) -> None:
    x = np.ones(256, np.float32)
    x.flags.writeable = False
    sim.launch("good_sum_float32_256", [x, np.zeros(1, np.float32)], params(256), [1], 256)
    assert (x == 1).all()


def test_executed_lists_what_ran(sim: Simulator) -> None:
    name = "good_sum_float32_40"
    sim.launch(name, [np.ones(40, np.float32), np.zeros(1, np.float32)], params(40), [1], 40)
    assert name in sim.executed()
    assert set(sim.executed()) <= set(sim.kernels())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kernel": "nothing"}, "there is no kernel of this name"),
        ({"buffers": [np.zeros(1)]}, "takes 2 buffers, but got 1"),
        ({"params": b"1234"}, "params must have 8 bytes, but got 4"),
        ({"threads": 0}, "must be 1 to 1024, but got 0"),
        ({"threads": 1025}, "must be 1 to 1024, but got 1025"),
    ],
)
def test_requests_are_validated(sim: Simulator, change: dict, message: str) -> None:
    request = dict(
        kernel="good_partial", buffers=[np.zeros(1)] * 2, params=params(1), grid=[1], threads=32
    )
    with pytest.raises(SimulatorError, match=message):
        sim.launch(**{**request, **change})


def test_order_of_the_environment(sim: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    def race(order: int) -> bytes:
        out = np.zeros(64, np.float32)
        sim.launch("bad_race", [out], np.uint32(64).tobytes(), [1], 64, order=order)
        return out.tobytes()

    results = {}
    for order in (0, 1, 5):
        monkeypatch.setenv("VQKV_SIM_ORDER", str(order))
        assert race(-1) == race(order)
        results[order] = race(order)
    assert results[0] != results[1]
    monkeypatch.setenv("VQKV_SIM_ORDER", "many")
    with pytest.raises(SimulatorError, match="VQKV_SIM_ORDER must be a number"):
        race(-1)
    monkeypatch.delenv("VQKV_SIM_ORDER")
    assert race(-1) == results[0]


def test_concurrent_launches(sim: Simulator) -> None:
    """Threads other than the main one launch at the same time."""
    failures: list[str] = []

    def work(seed: int) -> None:
        x = np.full(2560, seed, np.float32)
        for _ in range(20):
            out = np.zeros(10, np.float32)
            sim.launch("good_sum_float32_256", [x, out], params(2560), [10], 256)
            if not (out == 256 * seed).all():
                failures.append(f"{seed}: {out}")
            try:
                fault = np.zeros(64, np.float32)
                sim.launch("bad_write_after", [fault], np.uint32(64).tobytes(), [2], 64)
                failures.append("no report")
            except SimulatorError:
                pass

    if "VQKV_TEST_SIMULATOR" in os.environ:
        pytest.skip("the sanitizer ends the process at the planted fault")
    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
