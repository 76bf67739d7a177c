"""The computed centroid tables against published constants, sampling and their own equations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vqkv_ext.codecs import lloyd_max

# positive halves for N(0, 1), and relative mean squared errors (Max 1960, table I, and beyond)
CENTROIDS = {
    1: [0.797885],
    2: [0.452780, 1.510418],
    3: [0.245094, 0.756005, 1.343909, 2.151946],
    4: [0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590],
}
ERRORS = {
    1: ".3634",
    2: ".11748",
    3: ".03455",
    4: ".00950",
    5: ".002505",
    6: ".000644",
    8: ".000041",
}


def density(x: np.ndarray, dim: int | None) -> np.ndarray:
    if dim is None:
        return np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    log_norm = math.lgamma(dim / 2) - math.lgamma((dim - 1) / 2) - 0.5 * math.log(math.pi * dim)
    return np.exp(log_norm) * np.maximum(1 - x * x / dim, 0) ** ((dim - 3) / 2)


def grid(dim: int | None, n: int = 2_000_001) -> tuple[np.ndarray, np.ndarray]:
    """Points and probabilities by the midpoint rule."""
    end = 9.0 if dim is None else math.sqrt(dim)
    x = (np.arange(n) + 0.5) / n * 2 * end - end
    return x, density(x, dim) * (2 * end / n)


def cell_means(c: np.ndarray, dim: int | None) -> tuple[np.ndarray, float]:
    """The mean of each centroid's cell, and the error of the table, by integration on a grid."""
    x, p = grid(dim)
    index = np.searchsorted((c[1:] + c[:-1]) / 2, x)
    mass = np.bincount(index, p, len(c))
    assert abs(p.sum() - 1) < 1e-6 and abs((p * x * x).sum() - 1) < 1e-6
    return np.bincount(index, p * x, len(c)) / mass, float((p * (x - c[index]) ** 2).sum())


@pytest.mark.parametrize("bits", range(1, 9))
def test_gaussian(bits):
    c = lloyd_max.gaussian(bits)
    assert c.shape == (1 << bits,) and np.array_equal(c, -c[::-1]) and (np.diff(c) > 0).all()
    if bits in CENTROIDS:
        assert np.abs(c[len(c) // 2 :] - CENTROIDS[bits]).max() < 1e-5
    distortion = lloyd_max.distortion(c)
    if bits in ERRORS:  # as many digits as are given
        digits = len(ERRORS[bits]) - 1
        assert abs(distortion - float(ERRORS[bits])) <= 0.5 * 10.0**-digits
    means, error = cell_means(c, None)
    assert np.abs(means - c).max() < 1e-5
    assert error == pytest.approx(distortion, rel=1e-5)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dim", [3, 4, 5, 64, 128])
def test_sphere(bits, dim):
    c = lloyd_max.sphere(bits, dim)
    assert c.shape == (1 << bits,) and np.array_equal(c, -c[::-1]) and (np.diff(c) > 0).all()
    assert c[-1] < math.sqrt(dim)
    means, error = cell_means(c, dim)
    assert np.abs(means - c).max() < 2e-5
    assert error == pytest.approx(lloyd_max.distortion(c, dim), rel=1e-4)


def test_sphere_of_three_dimensions_is_uniform():
    """A coordinate of a random point on the ordinary sphere is uniform (Archimedes)."""
    for bits in (1, 3, 6):
        n = 1 << bits
        want = ((np.arange(n) + 0.5) / n * 2 - 1) * math.sqrt(3)
        assert np.abs(lloyd_max.sphere(bits, 3) - want).max() < 1e-9
        assert lloyd_max.distortion(want, 3) == pytest.approx(4.0**-bits, rel=1e-9)


def test_sphere_tends_to_gaussian():
    for bits in (1, 2, 3, 4):
        g = lloyd_max.gaussian(bits)
        apart = [np.abs(lloyd_max.sphere(bits, d) / g - 1).max() for d in (64, 128, 1024, 10**6)]
        assert apart == sorted(apart, reverse=True) and apart[1] < 0.02 and apart[3] < 1e-5


def test_sphere_on_random_unit_vectors():
    rng = np.random.default_rng(5)
    x = rng.standard_normal((20_000, 64))
    x *= 8 / np.linalg.norm(x, axis=1, keepdims=True)
    for bits in (1, 2, 4):
        c = lloyd_max.sphere(bits, 64)
        error = np.abs(x[..., None] - c).min(-1) ** 2
        assert error.mean() == pytest.approx(lloyd_max.distortion(c, 64), rel=0.01)


def sums(bits1: int, bits2: int) -> np.ndarray:
    c1, c2 = lloyd_max.residual(bits1, bits2)
    assert c1.shape == (1 << bits1,) and c2.shape == (1 << bits2,)
    for c in (c1, c2):
        assert np.array_equal(c, -c[::-1]) and (np.diff(c) > 0).all()
    return (c1[:, None] + c2).reshape(-1)


def test_residual_of_two_bits_is_one_stage():
    c1, c2 = lloyd_max.residual(1, 1)
    assert abs(c1[1] - 0.9816) < 5e-5 and abs(c2[1] - 0.5288) < 5e-5
    assert np.abs(np.sort(sums(1, 1)) - lloyd_max.gaussian(2)).max() < 1e-6


@pytest.mark.parametrize(
    ("bits", "most"), [((1, 1), 0.11749), ((2, 1), 0.0353), ((1, 2), 0.0353), ((2, 2), 0.0100)]
)
def test_residual_error(bits, most):
    table = np.sort(sums(*bits))
    error = lloyd_max.distortion(table)
    assert lloyd_max.distortion(lloyd_max.gaussian(sum(bits))) - 1e-9 <= error <= most
    x = np.random.default_rng(3).standard_normal(400_000)
    sampled = (np.abs(x[:, None] - table).min(-1) ** 2).mean()
    assert sampled == pytest.approx(error, rel=0.02)


@pytest.mark.parametrize("bits", [(2, 1), (2, 2), (3, 1)])
def test_residual_is_a_local_optimum(bits):
    c1, c2 = lloyd_max.residual(*bits)
    least = lloyd_max.distortion(sums(*bits))
    rng = np.random.default_rng(1)
    for _ in range(100):
        moved = []
        for c in (c1, c2):
            d = rng.standard_normal(len(c) // 2) * 1e-3
            moved.append(c + np.concatenate([-d[::-1], d]))
        assert lloyd_max.distortion((moved[0][:, None] + moved[1]).reshape(-1)) > least


def test_tables_are_cached_and_read_only():
    tables = (lloyd_max.gaussian(2), lloyd_max.sphere(2, 64), *lloyd_max.residual(1, 1))
    assert lloyd_max.gaussian(2) is tables[0] and lloyd_max.residual(1, 1)[0] is tables[2]
    for table in tables:
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lloyd_max.gaussian(0), r"gaussian\] bits must be an integer 1 to 8, but got 0"),
        (lambda: lloyd_max.gaussian(9), "but got 9"),
        (lambda: lloyd_max.sphere(2.5, 64), r"sphere\] bits must be an integer 1 to 8"),
        (lambda: lloyd_max.sphere(2, 2), "dim must be an integer >= 3, but got 2"),
        (lambda: lloyd_max.residual(0, 2), "bits1 must be"),
        (lambda: lloyd_max.residual(5, 4), r"bits1 \+ bits2 must be"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
