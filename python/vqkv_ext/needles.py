"""Needle retrieval: facts hidden in a long text, and asked for at its end.

A haystack holds several needles at even depths, so that one pass over it serves as many questions.
Only needles that the reference finds say anything of a cache: a small model misses some by itself.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .evaluation import MakeCache, read, stock_cache

DEPTHS = 10
"""Needles per haystack, in the middles of as many equal parts."""

_FACTS = (
    "The captain of the green ship is called",
    "The password of the wine cellar is",
    "In the blue box lay nothing but a",
    "The old clock was sold for a",
    "My aunt's favourite word was always",
    "Behind the door of the mill they found a",
    "The horse that won the race was named",
    "The letter was sealed with the word",
    "The children's cat answers only to",
    "On the last page of the diary stands",
)
_WORDS = (
    "apple bridge candle desert engine feather garden hammer island jacket kitchen ladder mirror "
    "needle orange pencil rabbit saddle ticket violin window basket copper dragon falcon guitar "
    "helmet magnet ribbon spider"
).split()


@dataclass(frozen=True)
class Question:
    """One needle.

    Attributes:
        depth: Where its sentence lies in the haystack, 0 to 1.
        prompt: Tokens that ask for it.
        answer: Tokens that must come next.
    """

    depth: float
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Haystack:
    """A text, and the questions about it."""

    tokens: list[int]
    questions: list[Question]


@dataclass(frozen=True)
class Retrieval:
    """Which needles were found in haystacks of one length.

    Attributes:
        length: Tokens of a haystack with its question.
        depths: Of every needle.
        reference: Whether the reference cache found it.
        found: The same for each cache.
    """

    length: int
    depths: list[float]
    reference: list[bool]
    found: dict[str, list[bool]]

    def count(self, name: str, depth: float | None = None) -> tuple[int, int]:
        """Needles that a cache found of those that the reference finds, and the number of these;
        of one depth or of all."""
        rows = zip(self.depths, self.reference, self.found[name], strict=True)
        hits = [hit for at, known, hit in rows if known and depth in (None, at)]
        return sum(hits), len(hits)

    def to_dict(self) -> dict[str, Any]:
        """Counts for JSON."""

        def counts(name: str) -> dict[str, Any]:
            found, known = self.count(name)
            by_depth = {f"{d:g}": self.count(name, d) for d in sorted(set(self.depths))}
            return {"found": found, "of": known, "by_depth": by_depth}

        return {
            "length": self.length,
            "needles": len(self.depths),
            "reference_finds": sum(self.reference),
            "caches": {name: counts(name) for name in self.found},
        }


def haystacks(
    encode: Callable[[str], list[int]],
    filler: Sequence[int],
    length: int,
    needles: int,
    *,
    seed: int = 0,
) -> list[Haystack]:
    """Texts of ``length`` tokens, the question included, with ``needles`` needles in all.

    Args:
        encode: A text to tokens, without any that begin a text.
        filler: Tokens of the text to hide the needles in; from another place for every haystack,
            and from its start again where it ends. The first token stays the first.
        length: Tokens.
        needles: A multiple of :data:`DEPTHS`.
        seed: Of the order of needles and of the words.

    Raises:
        ValueError: Arguments outside these ranges, or a length that the needles alone fill.
    """
    if needles < 1 or needles % DEPTHS:
        raise ValueError(f"[haystacks] needles must be a multiple of {DEPTHS}, but got {needles}.")
    if len(filler) < 2:
        raise ValueError(f"[haystacks] filler must have at least 2 tokens, but got {len(filler)}.")
    rng = np.random.default_rng(seed)
    count = needles // DEPTHS
    return [_haystack(encode, filler, length, i / count, rng) for i in range(count)]


def _haystack(
    encode: Callable[[str], list[int]],
    filler: Sequence[int],
    length: int,
    start: float,
    rng: np.random.Generator,
) -> Haystack:
    questions, sentences = [], []
    facts, words = (rng.choice(x, DEPTHS, replace=False) for x in (_FACTS, _WORDS))
    for i, (fact, word) in enumerate(zip(facts, words, strict=True)):
        sentences.append(encode(f"\n{fact} {word}.\n"))
        prompt, whole = encode(f"\n{fact}"), encode(f"\n{fact} {word}")
        if whole[: len(prompt)] != prompt:
            raise ValueError(
                "[haystacks] encode must give the tokens of a text's beginning first, but "
                f"{fact!r} and {fact + f' {word}'!r} begin differently."
            )
        questions.append(Question((i + 0.5) / DEPTHS, prompt, whole[len(prompt) :]))
    asked = max(len(q.prompt) + len(q.answer) - 1 for q in questions)
    room = length - asked - sum(map(len, sentences))
    if room < DEPTHS + 1:
        raise ValueError(
            f"[haystacks] length must be at least {length - room + DEPTHS + 1}, but got {length}."
        )
    body = list(filler[1:])
    at = int(start * len(body))
    turned = body[at:] + body[:at]
    text = (turned * math.ceil((room - 1) / len(turned)))[: room - 1]
    tokens, used = [filler[0]], 0
    for question, sentence in zip(questions, sentences, strict=True):
        until = round(question.depth * len(text))
        tokens += text[used:until] + sentence
        used = until
    return Haystack(tokens + text[used:], questions)


def retrieve(
    model: nn.Module,
    stacks: Sequence[Haystack],
    caches: Mapping[str, MakeCache],
    *,
    chunk: int = 64,
    reference: MakeCache | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Retrieval:
    """Ask for every needle of the haystacks, which are of one length.

    A needle is found if each token of its answer is the most probable one after those before it,
    which is what greedy generation would give.

    Args:
        model: An mlx_lm model.
        stacks: From :func:`haystacks`.
        caches: For each name a function that returns a fresh list of per-layer caches.
        chunk: Tokens per forward pass.
        reference: Makes the reference cache; by default the model's stock cache.
        progress: Called with the haystacks read and their total, each counted once per cache.

    Raises:
        ValueError: There are no haystacks, or no tokens in a chunk.
    """
    if not stacks or chunk < 1:
        raise ValueError(
            "[retrieve] there must be haystacks and chunks of at least 1 token, but got "
            f"{len(stacks)} and {chunk}."
        )
    plain = reference or (lambda: stock_cache(model))
    makers = [plain, *caches.values()]
    hits: list[list[bool]] = [[] for _ in makers]
    for i, stack in enumerate(stacks):
        for j, make in enumerate(makers):
            cache = make()
            read(model, cache, stack.tokens, chunk)
            hits[j] += [_answers(model, cache, q) for q in stack.questions]
            if progress:
                progress(i * len(makers) + j + 1, len(stacks) * len(makers))
    asked = max(len(q.prompt) + len(q.answer) - 1 for q in stacks[0].questions)
    return Retrieval(
        length=len(stacks[0].tokens) + asked,
        depths=[q.depth for stack in stacks for q in stack.questions],
        reference=hits[0],
        found=dict(zip(caches, hits[1:], strict=True)),
    )


def _answers(model: nn.Module, cache: list[Any], question: Question) -> bool:
    ids = mx.array([question.prompt + question.answer[:-1]])
    logits = model(ids, cache=copy.deepcopy(cache))[0, len(question.prompt) - 1 :]
    return mx.argmax(logits, axis=-1).tolist() == question.answer
