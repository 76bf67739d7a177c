"""trellis_encode: against all streams there are, bit for bit against the reference on every
executor, the trained tables, gradients and vmap."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from oracle import DTYPES, f64, unpack
from vqkv_ext import ops, reference
from vqkv_ext.codecs.trellis import TrellisCodec, trained_table

BITS = (1, 2, 3, 4)
WIDTHS = (1, 2, 7, 33, 64, 128, 130)
SCALES = ("mse", "norm", "unbiased", "matched")
ERROR = {1: 0.290, 2: 0.0800, 3: 0.0225, 4: 0.0066}
"""Most squared error per value of variance 1."""


def normal(rng, *shape, scale=1.0):
    return mx.array((rng.standard_normal(shape) * scale).astype(np.float32))


def table_of(rng):
    return normal(rng, 256)


def same(got, want):
    return all(
        np.array_equal(f64(a), f64(b), equal_nan=True) for a, b in zip(got, want, strict=True)
    )


def states_of(codes, bits, width):
    return unpack(np.array(codes), 8, bits, width)


@pytest.mark.sim
@pytest.mark.parametrize(("bits", "width"), [(1, 5), (2, 4), (3, 3), (4, 3), (4, 1)])
def test_no_stream_is_better(rng, bits, width):
    """All streams of a few values, in float64."""
    n = bits * (width - 1) + 8
    streams = np.arange(1 << n)
    every = (streams[:, None] >> (bits * np.arange(width))) & 255
    table, x = table_of(rng), normal(rng, 30, width, scale=3)
    codes, _ = ops.trellis_encode(x, table, bits)
    u = f64(x) * np.sqrt(width / (f64(x) ** 2).sum(-1, keepdims=True))
    least = [np.square(row - f64(table)[every]).sum(-1).min() for row in u]
    found = np.square(u - f64(table)[states_of(codes, bits, width)]).sum(-1)
    assert (found <= np.array(least) * (1 + 1e-5) + 1e-6).all()
    octets = np.array(codes).astype(int) << (8 * np.arange(codes.shape[-1]))
    assert (octets.sum(-1) < 1 << n).all()  # unused bits are zero


@pytest.mark.sim
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bits", BITS)
def test_same_bits_as_the_reference(rng, poison, bits, width):
    table, x = table_of(rng), normal(rng, 37, width, scale=5)
    x[3], x[4] = 0, x[4] * 1e-12
    for scale in SCALES:
        poison(x.nbytes)
        got = ops.trellis_encode(x, table, bits, scale=scale)
        assert got[0].dtype == mx.uint8 and got[1].dtype == mx.bfloat16
        assert got[0].shape == (37, (bits * (width - 1) + 15) // 8) and got[1].shape == (37,)
        assert same(got, reference.trellis_encode(x, table, bits, scale=scale)), scale


def test_same_bits_for_every_instruction_set(rng, tmp_path):
    """Those that this machine has: a higher one than it has cannot be asked for."""
    code = """if True:
        import sys, mlx.core as mx
        mx.set_default_device(mx.cpu)
        from vqkv_ext import ops
        kept = mx.load(sys.argv[1])
        for bits in (1, 2, 3, 4):
            codes, scales = ops.trellis_encode(kept["x"], kept["table"], bits)
            assert mx.array_equal(codes, kept[f"codes{bits}"]), bits
            assert mx.array_equal(scales, kept[f"scales{bits}"]), bits
    """
    kept = {"x": normal(rng, 40, 70), "table": table_of(rng)}
    for bits in BITS:
        codes, scales = ops.trellis_encode(kept["x"], kept["table"], bits)
        kept |= {f"codes{bits}": codes, f"scales{bits}": scales}
    path = str(tmp_path / "kept.safetensors")
    mx.save_safetensors(path, kept)
    for isa in ("avx512", "avx2", "baseline"):
        env = os.environ | {"VQKV_CPU_ISA": isa, "VQKV_EXECUTOR": ""}
        command = [sys.executable, "-c", code, path]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, (isa, done.stderr)


@pytest.mark.sim
@pytest.mark.parametrize("bits", BITS)
def test_widest_rows(rng, bits):
    table, x = table_of(rng), normal(rng, 3, 576)
    got = ops.trellis_encode(x, table, bits)
    assert same(got, ops.trellis_encode(x, table, bits, use_metal_kernels=False))


@pytest.mark.sim
@pytest.mark.parametrize("bits", BITS)
def test_ties_go_to_the_lower_state(rng, bits):
    """Of two states that always cost the same the upper one is never needed."""
    x = normal(rng, 20, 40)
    assert not np.array(ops.trellis_encode(x, mx.ones((256,)), bits)[0]).any()
    table = mx.repeat(normal(rng, 128), 2)  # states 2 i and 2 i + 1
    got = ops.trellis_encode(x, table, bits)
    assert same(got, reference.trellis_encode(x, table, bits))
    assert not (np.array(got[0])[:, 0] & 1).any()


@pytest.mark.sim
@pytest.mark.parametrize("bits", BITS)
def test_not_a_number_and_infinity(rng, bits):
    table, x = table_of(rng), np.array(normal(rng, 8, 50))
    clean = ops.trellis_encode(mx.array(x), table, bits)
    x[1, 7], x[2, 0], x[5, 49], x[6] = np.nan, np.inf, -np.inf, 1e20
    got = ops.trellis_encode(mx.array(x), table, bits)
    assert same(got, reference.trellis_encode(mx.array(x), table, bits))
    bad = np.isin(np.arange(8), (1, 2, 5, 6))
    assert not np.array(got[0])[bad].any() and np.isnan(f64(got[1])[bad]).all()
    for a, b in zip(got, clean, strict=True):
        assert np.array_equal(f64(a)[~bad], f64(b)[~bad])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (5,), (2, 0), (2, 3, 5)])
def test_shapes_types_and_strides(rng, shape, dtype):
    table = table_of(rng)
    x = normal(rng, *shape, 40).astype(DTYPES[dtype])[..., ::2]
    codes, scales = ops.trellis_encode(x, table.astype(mx.float16), 3)
    assert codes.shape == (*shape, 9) and scales.shape == shape
    flat = mx.contiguous(x).astype(mx.float32).reshape(-1, 20)
    want = ops.trellis_encode(flat, table.astype(mx.float16).astype(mx.float32), 3)
    assert same((codes.reshape(-1, 9), scales.reshape(-1)), want)
    plain = ops.trellis_encode(x, table.astype(mx.float16), 3, use_metal_kernels=False)
    assert [(a.shape, a.dtype) for a in plain] == [(a.shape, a.dtype) for a in (codes, scales)]


def test_same_split_anywhere(rng):
    """Case T04 for the op: rows coded together, apart, or one by one are the same bits."""
    table, x = table_of(rng), normal(rng, 2, 35, 96)
    whole = ops.trellis_encode(x, table, 2)
    single = [ops.trellis_encode(x[:, i : i + 1], table, 2) for i in range(35)]
    joined = [mx.concatenate(parts, axis=1) for parts in zip(*single, strict=True)]
    assert same(whole, joined)


@pytest.mark.parametrize("bits", BITS)
def test_error_of_the_trained_tables(rng, bits, simulated):
    """Gaussian rows of 128; the scale is that of least squares."""
    x, table = normal(rng, 1000 if simulated else 100_000, 128), trained_table(bits)
    assert mx.array_equal(table.astype(mx.float16).astype(mx.float32), table)
    codes, scales = ops.trellis_encode(x, table, bits, scale="mse")
    y = reference.decode(
        codes[None, None], table[None, None, :, None], bits, 1, scales[None, None]
    )[0, 0, :, :128]
    assert 0.6 * ERROR[bits] < (x - y).square().mean().item() <= ERROR[bits]


@pytest.mark.parametrize("bits", BITS)
def test_scales_are_what_they_are_called(rng, bits):
    table, x = trained_table(bits), normal(rng, 200, 64, scale=30)
    for scale in SCALES:
        codes, scales = ops.trellis_encode(x, table, bits, scale=scale)
        y, levels = f64(x), f64(table)[states_of(codes, bits, 64)]
        norm2, dot, square = (y * y).sum(-1), (y * levels).sum(-1), (levels * levels).sum(-1)
        want = {
            "mse": dot / square,
            "norm": np.sqrt(norm2 / 64),
            "unbiased": norm2 / dot,
            "matched": np.sqrt(norm2 / square),
        }[scale]
        assert np.abs(f64(scales) / want - 1).max() < 2.0**-8


def test_training_makes_such_tables():
    """Two rounds of the script that wrote the tables, twice; and its error falls with rounds."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
    import train_trellis

    test = train_trellis.rows(np.random.default_rng(1), 500, 128)
    runs = [train_trellis.train(2, np.random.default_rng(3), n, 300, 128, 0.1) for n in (2, 2, 12)]
    assert np.array_equal(runs[0], runs[1])
    errors = [train_trellis.squared_error(test, t, 2) for t in (runs[0], runs[2])]
    assert errors[1] < 0.95 * errors[0]
    assert train_trellis.squared_error(test, np.array(trained_table(2)), 2) < errors[1]


def test_derivatives_are_zero(rng):
    table, x = table_of(rng), normal(rng, 4, 10)
    f = lambda x, t: ops.trellis_encode(x, t, 2)[1].astype(mx.float32).sum()  # noqa: E731
    gx, gt = mx.grad(f, argnums=(0, 1))(x, table)
    assert gx.shape == x.shape and not mx.any(gx) and gt.shape == (256,) and not mx.any(gt)
    out, tangents = mx.jvp(lambda x: ops.trellis_encode(x, table, 2), [x], [mx.ones_like(x)])
    assert same(out, ops.trellis_encode(x, table, 2))
    assert [t.dtype for t in tangents] == [mx.uint8, mx.bfloat16]
    assert not any(mx.any(t) for t in tangents)


def test_vmap_and_compile(rng):
    tables, x = normal(rng, 3, 256), normal(rng, 5, 3, 10)
    call = lambda x, t: ops.trellis_encode(x, t, 3, scale="mse")  # noqa: E731
    rows = [call(x[:, i], tables[i]) for i in range(3)]
    both = mx.vmap(call, in_axes=(1, 0))(x, tables)
    one = mx.vmap(call, in_axes=(None, 0))(x[:, 0], tables)
    shared = mx.vmap(call, in_axes=(1, None))(x, tables[0])
    for j in range(2):
        assert np.array_equal(f64(both[j]), np.stack([f64(r[j]) for r in rows]))
        assert np.array_equal(f64(one[j][0]), f64(rows[0][j]))
        assert np.array_equal(f64(shared[j][2]), f64(call(x[:, 2], tables[0])[j]))
    assert same(mx.compile(call)(x, tables[0]), call(x, tables[0]))


@pytest.mark.parametrize(
    ("x", "table", "bits", "scale", "message"),
    [
        (mx.zeros((2, 4), mx.int32), mx.zeros((256,)), 2, "mse", "x must be float32, float16 or"),
        (mx.array(1.0), mx.zeros((256,)), 2, "mse", r"1 to 576, but got shape \(\)"),
        (mx.zeros((2, 0)), mx.zeros((256,)), 2, "mse", r"1 to 576, but got shape \(2,0\)"),
        (mx.zeros((2, 577)), mx.zeros((256,)), 2, "mse", "1 to 576, but got shape"),
        (mx.zeros((2, 4)), mx.zeros((256,)), 0, "mse", "bits must be 1, 2, 3 or 4, but got 0"),
        (mx.zeros((2, 4)), mx.zeros((256,)), 5, "mse", "bits must be 1, 2, 3 or 4, but got 5"),
        (mx.zeros((2, 4)), mx.zeros((256,), mx.int8), 2, "mse", "table must be float32"),
        (mx.zeros((2, 4)), mx.zeros((128,)), 2, "mse", r"table must have shape \[256\]"),
        (mx.zeros((2, 4)), mx.zeros((1, 256)), 2, "mse", r"table must have shape \[256\]"),
        (mx.zeros((2, 4)), mx.zeros((256,)), 2, "max", "scale must be .* but got 'max'"),
    ],
)
def test_errors(x, table, bits, scale, message):
    with pytest.raises(ValueError, match=rf"\[trellis_encode\].*{message}"):
        ops.trellis_encode(x, table, bits, scale=scale)


def test_codec_errors():
    with pytest.raises(ValueError, match=r"\[trellis\] bits must be one of .* but got 5"):
        TrellisCodec("trellis", 64, 5)
    with pytest.raises(ValueError, match=r"\[trained_table\] bits must be one of .* but got 0"):
        trained_table(0)
