"""How long greedy generation goes on as it would with an uncompressed cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .evaluation import MakeCache, read, stock_cache


@dataclass(frozen=True)
class Agreement:
    """Greedy continuations against the reference's.

    Attributes:
        tokens: Length of a continuation.
        same: For each prompt the tokens before the first that differs.
    """

    tokens: int
    same: list[int]

    @property
    def mean(self) -> float:
        """Mean number of tokens before the first that differs."""
        return sum(self.same) / len(self.same)

    @property
    def whole(self) -> int:
        """Continuations that do not differ at all."""
        return sum(n == self.tokens for n in self.same)

    def to_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "same": self.same, "mean": self.mean, "whole": self.whole}


def agreement(
    model: nn.Module,
    tokens: Sequence[int],
    length: int,
    caches: Mapping[str, MakeCache],
    *,
    prompts: int = 8,
    chunk: int = 64,
    reference: MakeCache | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Agreement]:
    """Continue several beginnings of a text greedily with each cache.

    The reference generates; another cache reads what it generated in one pass, whose most probable
    tokens are those it would generate itself up to the first difference. Tokens that end a text
    do not end a continuation.

    Args:
        model: An mlx_lm model.
        tokens: Of the text, whose beginnings are equal parts of it: one, two, and so on.
        length: Tokens to generate.
        caches: For each name a function that returns a fresh list of per-layer caches.
        prompts: Number of beginnings.
        chunk: Tokens per forward pass.
        reference: Makes the reference cache; by default the model's stock cache.
        progress: Called with the tokens read and their total, those of all caches together.

    Raises:
        ValueError: Nothing to generate, or a text of fewer tokens than prompts.
    """
    if min(length, chunk, prompts) < 1 or len(tokens) < prompts:
        raise ValueError(
            "[agreement] length, chunk and prompts must be at least 1 and the text of as many "
            f"tokens as prompts, but got {length}, {chunk}, {prompts} and {len(tokens)} tokens."
        )
    makers = [reference or (lambda: stock_cache(model)), *caches.values()]
    stops = [len(tokens) * (i + 1) // prompts for i in range(prompts)]
    continuations: list[list[int]] = []
    same: list[list[int]] = []
    for j, make in enumerate(makers):
        cache, at, counts = make(), 0, []
        for i, stop in enumerate(stops):
            last = mx.argmax(read(model, cache, tokens[at:stop], chunk)).item()
            at = stop
            branch = copy.deepcopy(cache)
            if j == 0:
                continuations.append(_generate(model, branch, last, length))
            else:
                counts.append(_matches(model, branch, last, continuations[i]))
            if progress:
                progress(j * len(tokens) + stop, len(makers) * len(tokens))
        if j:
            same.append(counts)
    return {name: Agreement(length, n) for name, n in zip(caches, same, strict=True)}


def _generate(model: nn.Module, cache: list[Any], token: int, length: int) -> list[int]:
    made = [token]
    while len(made) < length:
        made.append(mx.argmax(model(mx.array([made[-1:]]), cache=cache)[0, -1]).item())
    return made


def _matches(model: nn.Module, cache: list[Any], token: int, expected: list[int]) -> int:
    found = [token]
    if len(expected) > 1:
        logits = model(mx.array([expected[:-1]]), cache=cache)[0]
        found += mx.argmax(logits, axis=-1).tolist()
    pairs = enumerate(zip(found, expected, strict=True))
    return next((i for i, (mine, theirs) in pairs if mine != theirs), len(expected))
