"""Optimal scalar centroids (Lloyd-Max), computed from the density when first asked for.

A table c_0 < c_1 < ... with the bounds b_i = (c_i + c_{i+1}) / 2 has the least mean squared error
for a log-concave density p where each centroid is the mean of its cell,

    c_i = m_i / p_i,    p_i = int p(x) dx,    m_i = int x p(x) dx    over [b_{i-1}, b_i],

an equation solved here by Newton's method, whose Jacobian is tridiagonal. Densities are symmetric
and have variance 1, so the positive half is solved for and errors are relative.

All tables are float64, read-only, ascending and cached.

Source: Max, "Quantizing for minimum distortion" (1960); Lloyd, "Least squares quantization in PCM"
(1982). The density of a coordinate of a rotated vector: TurboQuant, arXiv 2504.19874.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

_FAR = 12.0  # standard deviations beyond which nothing is left
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)
_STARTS = 48  # of residual(); only the best is followed to the end


class _Gaussian:
    """N(0, 1), over x >= 0."""

    end = math.inf

    def above(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Probability and first moment of [x, end)."""
        mass = np.array([0.5 * math.erfc(v / math.sqrt(2.0)) for v in x])
        return mass, self.density(x)  # x p(x) = -p'(x)

    def density(self, x: np.ndarray) -> np.ndarray:
        return np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


class _Sphere:
    """sqrt(D) times a coordinate t = sin(a) of a random unit vector, over x >= 0.

    The density of t, (1 - t^2)^((D - 3) / 2), is cos(a)^(D - 2) in a: smooth for every D >= 2.
    """

    def __init__(self, dim: int):
        self.root = math.sqrt(dim)
        self.power = dim - 2
        self.end = self.root
        self.total = 2.0 * self._integral(np.zeros(1), np.array([self._far()]))[0]

    def _far(self) -> float:
        return math.asin(min(1.0, _FAR / self.root))

    def _integral(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        half = 0.5 * (b - a)[:, None]
        return (half * _WEIGHTS * np.cos(a[:, None] + half * (1.0 + _NODES)) ** self.power).sum(1)

    def above(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        a = np.arcsin(np.minimum(x / self.root, 1.0))
        b = np.append(a[1:], max(self._far(), a[-1]))
        mass = np.cumsum(self._integral(a, b)[::-1])[::-1]
        moment = np.cos(a) ** (self.power + 1) / (self.power + 1) * self.root
        return mass / self.total, moment / self.total

    def density(self, x: np.ndarray) -> np.ndarray:
        t2 = np.minimum((x / self.root) ** 2, 1.0)
        return (1.0 - t2) ** ((self.power - 1) / 2) / (self.total * self.root)


_Density = _Gaussian | _Sphere


def _cells(density: _Density, c: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bounds, the first being 0, and masses and moments of the cells of centroids c > 0."""
    bounds = np.append(0.0, 0.5 * (c[:-1] + c[1:]))
    mass, moment = density.above(bounds)
    return bounds, mass - np.append(mass[1:], 0.0), moment - np.append(moment[1:], 0.0)


def _solve(density: _Density, levels: int) -> np.ndarray:
    """The `levels` positive centroids."""
    # quantiles of the cube root of the density (Panter and Dite), on a grid
    x = np.linspace(0.0, min(density.end, 8.0), 4096)[:-1]
    weight = np.cumsum(np.cbrt(density.density(x)))
    c = np.interp((np.arange(levels) + 0.5) / levels * weight[-1], weight, x)
    for _ in range(200):
        bounds, mass, moment = _cells(density, c)
        mean = moment / mass
        # d mean_i / d b = p(b) (b - mean_i) / mass_i at the upper bound, minus that at the lower,
        # and each bound but 0 moves by half of what its centroids move
        p = density.density(bounds[1:])
        upper = 0.5 * p * (bounds[1:] - mean[:-1]) / mass[:-1]
        lower = 0.5 * p * (mean[1:] - bounds[1:]) / mass[1:]
        jacobian = np.eye(levels) - np.diag(np.append(upper, 0.0) + np.append(0.0, lower))
        jacobian -= np.diag(upper, 1) + np.diag(lower, -1)
        step = np.linalg.solve(jacobian, mean - c)
        moved = c + step
        if not (np.all(np.diff(moved) > 0.0) and moved[0] > 0.0 and moved[-1] < density.end):
            moved = mean  # a step of Lloyd's iteration keeps the order
        done = np.abs(moved - c).max() < 1e-11  # convergence is quadratic
        c = moved
        if done:
            break
    return c


def _read_only(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


def _symmetric(positive: np.ndarray) -> np.ndarray:
    return np.concatenate([-positive[::-1], positive])


def _check_bits(what: str, name: str, bits: int) -> None:
    if not isinstance(bits, int) or not 1 <= bits <= 8:
        raise ValueError(f"[lloyd_max.{what}] {name} must be an integer 1 to 8, but got {bits!r}.")


@cache
def gaussian(bits: int) -> np.ndarray:
    """Centroids ``[2^bits]`` for N(0, 1).

    Args:
        bits: 1 to 8; relative mean squared errors .3634, .1175, .0345, .0095, .0025, ...

    Raises:
        ValueError: bits out of range.
    """
    _check_bits("gaussian", "bits", bits)
    return _read_only(_symmetric(_solve(_Gaussian(), 1 << (bits - 1))))


@cache
def sphere(bits: int, dim: int) -> np.ndarray:
    """Centroids ``[2^bits]`` for ``sqrt(dim)`` times a coordinate of a random unit vector of
    ``dim`` dimensions, whose density is proportional to ``(1 - x^2 / dim)^((dim - 3) / 2)``.

    It tends to :func:`gaussian` as ``dim`` grows; at 128 the two differ by less than 2%.

    Args:
        bits: 1 to 8.
        dim: At least 3 (uniform density).

    Raises:
        ValueError: bits or dim out of range.
    """
    _check_bits("sphere", "bits", bits)
    if not isinstance(dim, int) or dim < 3:
        raise ValueError(f"[lloyd_max.sphere] dim must be an integer >= 3, but got {dim!r}.")
    return _read_only(_symmetric(_solve(_Sphere(dim), 1 << (bits - 1))))


def distortion(centroids: np.ndarray, dim: int | None = None) -> float:
    """Mean squared error of coding values to their nearest centroid, relative to their variance.

    Args:
        centroids: Symmetric about 0, in any order; an even number of them.
        dim: The density is that of :func:`sphere`; None: of :func:`gaussian`.
    """
    c = np.sort(np.asarray(centroids, np.float64))
    c = c[len(c) // 2 :]
    _, mass, moment = _cells(_Gaussian() if dim is None else _Sphere(dim), c)
    return float(1.0 + 2.0 * (mass * c * c - 2.0 * moment * c).sum())


def _descend(
    c: np.ndarray, first: int, signs: np.ndarray, density: _Density, iterations: int
) -> tuple[float, np.ndarray]:
    """Lloyd's iteration for sums: cells of the sums, then the positive centroids c = [c1 | c2] of
    least error for these cells (a linear system)."""
    error = math.inf
    for _ in range(iterations):
        sums = signs @ c
        order = np.argsort(sums)[len(sums) // 2 :]
        s, a = sums[order], signs[order]
        _, mass, moment = _cells(density, s)
        now = float(1.0 + 2.0 * (mass * s * s - 2.0 * moment * s).sum())
        if error - now < 1e-15:
            break
        error = now
        c = np.linalg.lstsq(a.T @ (mass[:, None] * a), a.T @ moment, rcond=1e-13)[0]
    return error, c


@cache
def residual(bits1: int, bits2: int) -> tuple[np.ndarray, np.ndarray]:
    """Two tables ``c1 [2^bits1]`` and ``c2 [2^bits2]`` for N(0, 1) whose sums ``c1[i] + c2[j]``
    have the least error over the best pair (i, j).

    They are optimised jointly, so a value must be coded to its nearest *sum*; coding it to c1 first
    and the rest to c2 is worse. Lloyd's iteration for sums alternates between the cells of the sums
    and, for these cells, the least squares solution for (c1, c2). It starts from a fixed set of
    random tables and the best is followed to the end. Both tables are symmetric about 0; those of
    equal size come with the wider one first.

    Relative mean squared errors: 1+1 .1175 (as one stage of 2 bits), 2+1 and 1+2 .0353, 2+2 .0099.

    Args:
        bits1, bits2: At least 1, and at most 8 together.

    Raises:
        ValueError: bits out of range.

    Source: residual scalar quantisation; Barnes et al., "Advances in residual vector quantization".
    """
    _check_bits("residual", "bits1", bits1)
    _check_bits("residual", "bits2", bits2)
    _check_bits("residual", "bits1 + bits2", bits1 + bits2)
    n1, n2 = 1 << (bits1 - 1), 1 << (bits2 - 1)
    one, two = _symmetric(np.eye(n1)), _symmetric(np.eye(n2))
    signs = np.concatenate([np.repeat(one, 2 * n2, 0), np.tile(two, (2 * n1, 1))], axis=1)
    density = _Gaussian()
    rng = np.random.default_rng(0)
    starts = []
    for _ in range(_STARTS):
        start = np.abs(rng.standard_normal(n1 + n2)) * np.repeat(rng.uniform(0.2, 1.5, 2), [n1, n2])
        starts.append(_descend(start, n1, signs, density, 40))
    c = min(starts, key=lambda s: s[0])[1]
    _, c = _descend(c, n1, signs, density, 4000)
    tables = [_symmetric(np.sort(np.abs(part))) for part in (c[:n1], c[n1:])]
    if n1 == n2:
        tables.sort(key=lambda t: -float(t @ t))
    return _read_only(tables[0]), _read_only(tables[1])
