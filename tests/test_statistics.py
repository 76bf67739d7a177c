"""What the codes reach on 100,000 random vectors of 128 values, and what rotations lose."""

from __future__ import annotations

import functools
import math

import mlx.core as mx
import numpy as np
import pytest

from oracle import DTYPES, f64
from vqkv_ext.codecs.lloyd_max import residual, sphere
from vqkv_ext.codecs.presets import PRESETS, codec
from vqkv_ext.codecs.qjl import QJLCodec
from vqkv_ext.codecs.rotations import rotation
from vqkv_ext.codecs.scalar import ScalarCodec
from vqkv_ext.codecs.transforms import SmoothedHadamard, has_hadamard

WIDTH, VECTORS, BLOCK = 128, 100_000, 50
DIMS = (64, 72, 80, 96, 112, 128, 192, 256, 512, 576)


@pytest.fixture(autouse=True)
def _not_simulated(simulated):
    if simulated:
        pytest.skip("statistics of codes that the executors agree on bit by bit")


@functools.cache
def unit_vectors(seed):
    """[1, 1, 100000, 128]: directions are uniform."""
    x = np.random.default_rng(seed).standard_normal((1, 1, VECTORS, WIDTH))
    return mx.array((x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32))


def dot(a, b):
    return f64((a * b).sum(-1)).ravel()


def scalar(bits, scale):
    levels = mx.array(sphere(bits, WIDTH).astype(np.float32))
    return ScalarCodec("scalar", WIDTH, bits, levels, scale=scale, seed=1)


@functools.cache
def measured(c):
    """Of decoded keys k' of unit keys k and unit queries q, all independent: the mean of
    |k' - k|^2, D times the variance of q . k' - q . k, and the mean and error of k' . k."""
    q, k = unit_vectors(1), unit_vectors(2)
    y = c.decode(c.encode(k, block=BLOCK), BLOCK)
    own = dot(y, k)
    return (
        dot(y - k, y - k).mean(),
        WIDTH * (dot(q, y) - dot(q, k)).var(),
        own.mean(),
        own.std() / math.sqrt(VECTORS),
    )


MSE = {1: 0.3615, 2: 0.1160, 3: 0.0340, 4: 0.0093}


@pytest.mark.parametrize("bits", MSE)
def test_scalar_codes(bits):
    """`mse`, the preset's scale, has the known error; `unbiased` has unbiased products."""
    error, _, own, _ = measured(scalar(bits, "mse"))
    assert 4.0**-bits < error <= MSE[bits]  # Shannon's bound below
    assert own == pytest.approx(1 - error, abs=1e-3)  # of least squares
    preset = codec(f"turboquant-{bits}bit", WIDTH, "key")
    assert measured(preset)[0] == error
    assert abs(measured(scalar(bits, "unbiased"))[2] - 1) <= 0.002


@pytest.mark.parametrize(("bits", "most"), [(2, 0.1190), (4, 0.0100)])
def test_residual_codes(bits, most):
    """1 + 1 and 2 + 2 bits, of tables that are optimal together."""
    c = codec(f"turboquant-rvq-{bits}bit", WIDTH, "key")
    sums = np.add.outer(*residual(bits // 2, bits // 2)).ravel()
    assert np.allclose(f64(c.centroids), np.sort(sums), rtol=2.0**-10)
    assert 4.0**-bits < measured(c)[0] <= most


PRODUCTS = {2: (0.116, 0.205), 3: (0.034, 0.066), 4: (0.0093, 0.019)}


@pytest.mark.parametrize("bits", PRODUCTS)
def test_variance_of_products(bits):
    """TurboQuant-Prod against the scalar code of the paper's scale at equal bits: unbiased up to
    terms of 1 / D, at nearly twice the variance."""
    plain, prod = PRODUCTS[bits]
    c = scalar(bits, "norm")
    assert measured(c)[1] == pytest.approx(plain, rel=0.05)
    assert measured(c)[0] == pytest.approx(plain, rel=0.05)
    mean_square, variance, own, _ = measured(codec(f"turboquant-prod-{bits}bit", WIDTH, "key"))
    assert variance == pytest.approx(prod, rel=0.05)
    assert mean_square == pytest.approx(prod, rel=0.05)
    assert abs(own - 1) < 0.5 / WIDTH < abs(measured(c)[2] - 1)


@pytest.mark.parametrize(("channels", "want"), [(128, 0.567), (256, 0.283), (512, 0.142)])
def test_variance_of_sketches(channels, want):
    _, variance, own, error = measured(QJLCodec("qjl", WIDTH, channels, seed=3))
    assert variance == pytest.approx(want, rel=0.05)
    assert abs(own - 1) < 4 * error + 0.5 / WIDTH
    preset = codec(f"qjl-{channels // WIDTH}bit", WIDTH, "key")
    assert measured(preset)[1] == pytest.approx(want, rel=0.05)


@pytest.mark.parametrize(
    ("name", "side"),
    [(n, "key") for n in PRESETS if n != "none"]
    + [(n, "value") for n in PRESETS if n.startswith(("centred", "trellis"))],
)
def test_half_precision_loses_nothing(name, side):
    """Errors of vectors given in float16 or bfloat16 are those of float32 to 1e-3."""
    n = 20_000
    x = unit_vectors(3)[:, :, :n] * mx.array(np.random.default_rng(4).uniform(0.5, 20, (n, 1)))
    c = codec(name, WIDTH, side)
    errors = []
    for dtype in DTYPES.values():
        given = x.astype(dtype)
        y = c.decode(c.encode(given, block=BLOCK), BLOCK)
        given = given.astype(mx.float32)
        errors.append(float((dot(y - given, y - given) / dot(given, given)).mean()))
    assert errors[0] > 0
    assert errors[1:] == pytest.approx([errors[0]] * 2, rel=1e-3)


@pytest.mark.parametrize("width", DIMS)
def test_rotations_are_inverted(rng, width):
    """To 1e-6 of each vector's length, in either order, and lengths are kept."""
    bases = [rotation(width, seed) for seed in (1, 2, 3)]
    if has_hadamard(width):
        smooth = rng.uniform(0.5, 2, (2, width)).astype(np.float32)
        bases.append(SmoothedHadamard(mx.array(smooth)))
    x = mx.array(rng.standard_normal((1, 2, 2000, width)).astype(np.float32))
    x[..., :500, 3] = 1000
    length = np.linalg.norm(f64(x), axis=-1)
    for basis in bases:
        y = basis.forward(x)
        assert mx.abs(y - x).max() > 1
        for there_and_back in (basis.inverse(y), basis.forward(basis.inverse(x))):
            lost = np.linalg.norm(f64(there_and_back) - f64(x), axis=-1)
            assert (lost < 1e-6 * length).all()
        if not isinstance(basis, SmoothedHadamard):
            assert np.allclose(np.linalg.norm(f64(y), axis=-1), length, rtol=1e-6)
