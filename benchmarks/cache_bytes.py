"""Bytes of caches, counted on the arrays of real ones.

As a program: the table of the README, for one KV head with random keys and values.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from vqkv_ext.cache import CompressedKVCache
from vqkv_ext.codecs import Codec, presets, query_aware, vecinfer
from vqkv_ext.codecs.calibration import ModelShape

MakeCache = Callable[[], list[Any]]
MAIN = (
    "centred-4bit", "centred-3bit", "centred-2bit", "turboquant-4bit", "turboquant-2bit",
    "trellis-4bit", "trellis-2bit", "trellis-1bit",
    "vecinfer-4bit", "vecinfer-2bit", "vecinfer-1.5bit", "vecinfer-1bit",
)  # fmt: skip


def held_bytes(caches: Sequence[Any]) -> int:
    """Bytes of the arrays that cache objects hold, whatever these report about themselves.

    Codecs are objects of their own, shared by all caches of a model, and not counted.
    """
    found: dict[int, int] = {}

    def walk(value: Any) -> None:
        if isinstance(value, mx.array):
            found[id(value)] = value.nbytes
        elif isinstance(value, dict):
            walk(list(value.values()))
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item)

    for cache in caches:
        walk(vars(cache))
    return sum(found.values())


def codec_bytes(codecs: Sequence[Codec]) -> int:
    """Bytes of tables, codebooks and rotations, those that codecs share counted once."""
    return sum({id(a): a.nbytes for c in codecs for a in c.arrays()}.values())


def any_codecs(preset: str, shape: ModelShape) -> tuple[Codec, Codec]:
    """Codecs of a preset for one layer; what has to be fitted is fitted to noise, which makes
    arrays as large as text does."""
    if preset in vecinfer.PRESETS:
        keys, values = _noise(shape, 300, mx.float32)
        return vecinfer.fit(vecinfer.PRESETS[preset], keys[0], values[0], iterations=1)
    if preset in query_aware.PRESETS:
        ones = mx.ones((shape.kv_heads, shape.key_dim))
        return query_aware.build(preset, ones, shape.key_dim, shape.value_dim)
    key = presets.codec(preset, shape.key_dim, "key")
    return key, presets.codec(preset, shape.value_dim, "value")


def fill(
    cache: Sequence[Any],
    shape: ModelShape,
    dtype: mx.Dtype,
    lengths: Sequence[int],
    *,
    chunk: int = 256,
    progress: Callable[[int], None] | None = None,
) -> list[int]:
    """Grow a cache by random keys and values and count its bytes at each of the rising lengths."""
    keys, values = _noise(shape, chunk, dtype)
    at, sizes = 0, []
    for length in lengths:
        while at < length:
            n = min(chunk, length - at)
            for c in cache:
                c.update_and_fetch(keys[:, :, :n], values[:, :, :n])
                mx.eval(c.state)
            at += n
            if progress is not None:
                progress(at)
        sizes.append(held_bytes(cache))
    return sizes


def per_token(lengths: Sequence[int], sizes: Sequence[int]) -> float:
    """Bytes of one more token, from the last two lengths: at multiples of 256 tokens caches are
    whole allocations, and beyond the windows they grow evenly."""
    return (sizes[-1] - sizes[-2]) / (lengths[-1] - lengths[-2])


def _noise(shape: ModelShape, tokens: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    keys, values = (
        mx.random.normal((1, shape.kv_heads, tokens, width)).astype(dtype)
        for width in (shape.key_dim, shape.value_dim)
    )
    return keys, values


def one_head(names: Sequence[str], width: int, lengths: Sequence[int]) -> dict[str, list[int]]:
    """For each name the bytes of one head's float16 cache at the lengths, then of its codec."""
    shape = ModelShape("one head", 1, 1, width, width)
    rows = {}
    for name, cache in (
        ("float16", KVCache()),
        ("mlx-lm `kv_bits=8`", QuantizedKVCache(group_size=64, bits=8)),
        ("mlx-lm `kv_bits=4`", QuantizedKVCache(group_size=64, bits=4)),
    ):
        rows[name] = [*fill([cache], shape, mx.float16, lengths), 0]
    for name in names:
        codecs = any_codecs(name, shape)
        cache = CompressedKVCache(*codecs)
        rows[f"`{name}`"] = [*fill([cache], shape, mx.float16, lengths), codec_bytes(codecs)]
    return rows


def markdown(rows: Mapping[str, Sequence[int]], lengths: Sequence[int]) -> str:
    """The rows of :func:`one_head`, those of most bytes per token first, beside the first row."""
    base = next(iter(rows.values()))
    slopes = {name: per_token(lengths, sizes[:-1]) for name, sizes in rows.items()}
    lines = [
        ["cache", "each further token", *(f"{n:,} tokens" for n in lengths), "codec"],
        ["---", *["---:"] * (len(lengths) + 2)],
    ]
    for name in sorted(rows, key=lambda n: -slopes[n]):
        *sizes, codec = rows[name]
        cells = [f"{size:,} ({full / size:.1f}x)" for size, full in zip(sizes, base, strict=False)]
        lines.append([name, f"{slopes[name]:.0f}", *cells, f"{codec:,}" if codec else "-"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = (*presets.PRESETS, *vecinfer.PRESETS, *query_aware.PRESETS)
    parser.add_argument("--presets", nargs="+", choices=known, default=MAIN, metavar="NAME")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1024, 4096, 32768], metavar="N",
        help="two or more, rising multiples of 256",
    )  # fmt: skip
    args = parser.parse_args()
    steps = zip([0, *args.lengths], args.lengths, strict=False)
    if len(args.lengths) < 2 or any(n % 256 or n <= last for last, n in steps):
        parser.error(f"--lengths must be two or more rising multiples of 256, got {args.lengths}")
    print(markdown(one_head(args.presets, args.head_dim, args.lengths), args.lengths))


if __name__ == "__main__":
    main()
