"""Needle retrieval, with a model that repeats what it has read and caches that forget."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest

from vqkv_ext.needles import DEPTHS, Haystack, haystacks, retrieve

LENGTH = 1200


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


FILLER = encode("A man must have food, and a house to keep the rain out. " * 20)


class Memory:
    """Holds tokens, of which the first ``limit`` can be found again."""

    def __init__(self, limit: int = 10**9):
        self.limit = limit
        self.tokens: list[int] = []

    @property
    def state(self):
        return mx.array(self.tokens[:1])


class Repeats:
    """Predicts what followed the longest match of what it has just read."""

    def __call__(self, ids: mx.array, cache: list[Memory]) -> mx.array:
        held, rows = cache[0], []
        for token in ids[0].tolist():
            held.tokens.append(token)
            rows.append(self._next(held))
        return mx.array(np.eye(128, dtype=np.float32)[rows])[None]

    @staticmethod
    def _next(held: Memory) -> int:
        now = held.tokens
        seen = now[: min(held.limit, len(now) - 1)]
        best, after = 0, 0
        for end in range(1, len(seen)):
            n = 0
            while n < end and n < 40 and seen[end - 1 - n] == now[-1 - n]:
                n += 1
            if n > best:
                best, after = n, seen[end]
        return after


@pytest.fixture(scope="module")
def stacks() -> list[Haystack]:
    return haystacks(encode, FILLER, LENGTH, 2 * DEPTHS)


def test_haystacks(stacks):
    for stack in stacks:
        asked = max(len(q.prompt) + len(q.answer) - 1 for q in stack.questions)
        assert len(stack.tokens) == LENGTH - asked
        assert stack.tokens[0] == FILLER[0]
        text = "".join(map(chr, stack.tokens))
        for i, q in enumerate(stack.questions):
            fact = "".join(map(chr, q.prompt + q.answer))
            assert text.count(fact + ".\n") == 1 and "".join(map(chr, q.answer))[0] == " "
            assert q.depth == (i + 0.5) / DEPTHS
            assert abs(text.index(fact) / len(text) - q.depth) < 0.06
        assert len({tuple(q.answer) for q in stack.questions}) == DEPTHS
    one, two = ("".join(map(chr, s.tokens)) for s in stacks)
    assert one[1:30] != two[1:30]  # filler from different places
    assert haystacks(encode, FILLER, LENGTH, 2 * DEPTHS) == stacks
    assert haystacks(encode, FILLER, LENGTH, 2 * DEPTHS, seed=1) != stacks


def test_retrieve_counts_what_the_reference_finds(stacks):
    half, seen = LENGTH // 2, []
    caches = {"whole": lambda: [Memory()], "half": lambda: [Memory(half)]}
    arguments = {"chunk": 100, "reference": lambda: [Memory()]}
    found = retrieve(Repeats(), stacks, caches, progress=lambda *n: seen.append(n), **arguments)
    assert found.length == LENGTH and seen == [(i + 1, 6) for i in range(6)]
    assert found.reference == [True] * 20 == found.found["whole"]
    assert found.found["half"] == [q.depth < 0.5 for s in stacks for q in s.questions]
    assert found.count("half") == (10, 20)
    assert found.count("half", 0.05) == (2, 2) and found.count("half", 0.95) == (0, 2)
    arguments["reference"] = lambda: [Memory(half)]
    less = retrieve(Repeats(), stacks[:1], caches, **arguments)
    assert less.count("whole") == (5, 5) and sum(less.found["whole"]) == 10
    facts = json.loads(json.dumps(less.to_dict()))
    assert (facts["needles"], facts["reference_finds"]) == (10, 5)
    assert facts["caches"]["half"]["by_depth"]["0.95"] == [0, 0]


def test_asking_leaves_the_cache_as_it_was(stacks):
    made = []

    def make():
        made.append([Memory()])
        return made[-1]

    retrieve(Repeats(), stacks[:1], {"one": make}, chunk=100, reference=lambda: [Memory()])
    assert made[0][0].tokens == stacks[0].tokens


def test_bad_arguments(stacks):
    for needles in (0, 15):
        with pytest.raises(ValueError, match=f"multiple of 10, but got {needles}"):
            haystacks(encode, FILLER, LENGTH, needles)
    with pytest.raises(ValueError, match="at least 2 tokens, but got 1"):
        haystacks(encode, FILLER[:1], LENGTH, 10)
    with pytest.raises(ValueError, match=r"length must be at least (\d+), but got 400") as e:
        haystacks(encode, FILLER, 400, 10)
    least = int(str(e.value).split("at least ")[1].split(",")[0])
    assert len(haystacks(encode, FILLER, least, 10)) == 1
    with pytest.raises(ValueError, match="begin differently"):
        haystacks(lambda s: [len(s)], FILLER, LENGTH, 10)
    for bad, chunk in (([], 8), (stacks, 0)):
        with pytest.raises(ValueError, match=r"\[retrieve\] there must be"):
            retrieve(Repeats(), bad, {}, chunk=chunk)
