"""Three speeds that the package promises, each against the best other way to do the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kernel_cases import OPS
from timing import milliseconds


@dataclass
class Target:
    title: str
    ops: list[str]
    n: int
    against: str
    least: float  # time of the other way over ours


TARGETS = [
    Target("hadamard_quantize, 4 bits, 2.1M", ["hadamard_quantize, 4 bits"], 1 << 21, "MLX", 5.0),
    Target(
        "pack_bits, 1e7, by bits 1 to 4",
        [f"pack_bits, {bits}" for bits in ("1 bit", "2 bits", "3 bits", "4 bits")],
        10**7,
        "NumPy",
        1.0,
    ),
    Target("qjl_encode, 16384 x 128, m = 128", ["qjl_encode, m=128"], 1 << 21, "NumPy", 0.5),
]


def without_result(call: Callable[[], object]) -> Callable[[], list]:
    def run() -> list:
        call()
        return []  # nothing for mx.eval

    return run


def advantage(name: str, target: Target, rounds: int) -> float:
    """Time of the fastest other way over that of ours. These two alternate, so that each finds what
    the other leaves in the caches; all ways in turns would favour those that share an input."""
    calls = OPS[name](target.n)
    others = calls.mlx if target.against == "MLX" else [without_result(c) for c in calls.numpy]
    race = milliseconds(*others, rounds=5, pick=min)
    fastest = others[race.index(min(race))]
    ours, theirs = milliseconds(calls.ours, fastest, rounds=rounds, pick=min)
    return theirs / ours


def speed_lines(rounds: int) -> tuple[list[str], bool]:
    """A line per target, and whether all are met."""
    lines, met = [], True
    for t in TARGETS:
        ratios = [advantage(name, t, rounds) for name in t.ops]
        ok = min(ratios) >= t.least
        met = met and ok
        found = " ".join(f"{r:.2f}x" for r in ratios)
        verdict = "ok" if ok else "MISS"
        lines.append(f"{t.title}: {found} of {t.against}'s speed, target {t.least:g}x: {verdict}")
    return lines, met
