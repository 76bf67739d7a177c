"""What a case is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

WIDTH = 128  # of a vector, where an op works on vectors

Numpy = Callable[[], np.ndarray | tuple[np.ndarray, ...]]
Mlx = Callable[[], mx.array | tuple[mx.array, ...]]


@dataclass
class Calls:
    """Ways to compute the same thing. `agree` is the least share of equal results (rounding may
    decide between centroids that are equally near, or the sign of a product near zero); floating
    results are equal within `tolerance` times the largest. `reads` are the inputs of ours."""

    ours: Mlx
    numpy: list[Numpy]
    mlx: list[Mlx]
    agree: float = 1.0
    tolerance: float = 0.0
    reads: tuple[mx.array, ...] = ()


OPS: dict[str, Callable[[int], Calls]] = {}


def op(name: str, *arguments: object) -> Callable:
    """Register `make(n, *arguments)` under a name."""

    def register(make: Callable[..., Calls]) -> Callable[..., Calls]:
        OPS[name] = lambda n: make(n, *arguments)
        return make

    return register


def compiled(way: Mlx) -> Mlx:
    """The way with its elementwise operations fused."""
    fused = mx.compile(way)

    def run() -> mx.array | tuple[mx.array, ...]:
        return fused()

    run.__name__ = f"{way.__name__}, compiled"
    return run


def rows(n: int) -> int:
    """Vectors that hold n values or a little more."""
    return -(-n // WIDTH)


def blocks(n: int, size: int) -> list[slice]:
    """Slices of n, small enough that NumPy's intermediate results stay in the cache."""
    return [slice(i, min(n, i + size)) for i in range(0, n, size)]
