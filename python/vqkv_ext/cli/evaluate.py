"""``vqkv eval``."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..codecs.presets import DEFAULT, PRESETS
from .common import (
    LONGEST_TOKEN,
    Defaults,
    InputError,
    at_least,
    check_output,
    first_tokens,
    load_model,
    read_text,
    require,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import mlx.nn as nn
    from rich.progress import Progress

    from ..agreement import Agreement
    from ..evaluation import MakeCache
    from ..needles import Haystack, Retrieval

_LEAST_TOKENS = 2
_PROMPTS = 8
_DEPTHS = 10  # as in vqkv_ext.needles, which needs mlx_lm


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="how much compressed caches change a model's predictions",
        formatter_class=Defaults,
    )
    parser.add_argument("model", metavar="MODEL", help="what mlx_lm.load takes, or a .gguf file")
    parser.add_argument(
        "text",
        metavar="TEXT",
        help="a UTF-8 file, - for standard input, or builtin (English; what calibrate fits to)",
    )
    parser.add_argument(
        "--kv",
        nargs="+",
        metavar="PRESET|FILE",
        default=[DEFAULT, "centred-3bit", "centred-2bit"],
        help="presets and files of `vqkv calibrate`",
    )
    parser.add_argument(
        "--tokens", type=at_least(_LEAST_TOKENS), default=1024, help="first tokens of the text"
    )
    parser.add_argument("--chunk", type=at_least(1), default=64, help="tokens per forward pass")
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        default=argparse.SUPPRESS,
        help="what to compute in (default: what the model is stored in)",
    )
    parser.add_argument(
        "--needle",
        nargs="+",
        type=at_least(1),
        metavar="TOKENS",
        default=(),
        help="hide words at ten depths of texts of so many tokens, and ask for them at the end",
    )
    parser.add_argument(
        "--needles", type=at_least(1), default=50, help="of each length, a multiple of 10"
    )
    parser.add_argument(
        "--greedy",
        type=at_least(1),
        metavar="TOKENS",
        default=argparse.SUPPRESS,
        help=f"continue {_PROMPTS} beginnings of the text by so many tokens, and count those that "
        "are the same as without compression",
    )
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument("--plot", metavar="FILE", default=argparse.SUPPRESS, help="a picture, .png")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    plot = Path(args.plot) if hasattr(args, "plot") else None
    if plot is not None:
        check_output(plot, ".png", (args.model, args.text))
        require("matplotlib", "plot")
    for name in args.kv:
        if name not in PRESETS and not Path(name).is_file():
            raise InputError(
                f"--kv must name presets ({', '.join(PRESETS)}) or files of `vqkv calibrate`, but "
                f"got {name!r}"
            )
    if args.needles % _DEPTHS:
        raise InputError(f"--needles must be a multiple of {_DEPTHS}, but got {args.needles}")
    require("mlx_lm")
    require("rich")
    import mlx.core as mx
    from rich.console import Console
    from rich.progress import Progress

    from ..evaluation import compare
    from .evaluate_output import facts, show

    text = read_text(args.text)
    errors = Console(stderr=True)
    with errors.status(f"loading {args.model}"):
        model, tokenizer = load_model(args.model)
    if hasattr(args, "dtype"):
        model.set_dtype(getattr(mx, args.dtype))
    greedy = getattr(args, "greedy", None)
    least = _LEAST_TOKENS if greedy is None else _PROMPTS
    tokens = first_tokens(tokenizer, text, args.text, args.tokens, least)
    stacks = [_haystacks(tokenizer, text, length, args.needles) for length in args.needle]
    caches = _caches(model, args.kv)
    with Progress(console=errors, transient=True) as bars:
        quality = compare(
            model,
            tokens,
            caches,
            chunk=args.chunk,
            progress=_bar(bars, f"{len(tokens)} tokens, {len(caches) + 1} caches", len(tokens)),
        )
        same = _agreement(model, tokens, greedy, caches, args.chunk, bars) if greedy else {}
        found = [_retrieve(model, s, caches, args.chunk, bars) for s in stacks]
    plain = f"{_dtype(model)} (mlx-lm)"
    if plot is not None:
        from ..plotting import plot_quality

        points = {name: (q.cache_bytes, q.kl) for name, q in quality.items()}
        plot_quality(points, plot, title=f"{Path(args.model).name}, {len(tokens)} tokens")
    if args.json:
        print(json.dumps(facts(args, len(tokens), plain, quality, same, found)))
    else:
        show(args, len(tokens), plain, quality, same, found)


def _bar(bars: Progress, what: str, total: int | None = None) -> Callable[[int, int], None]:
    task = bars.add_task(what, total=total)
    return lambda done, total: bars.update(task, completed=done, total=total)


def _haystacks(tokenizer: Any, text: str, length: int, needles: int) -> list[Haystack]:
    from ..needles import haystacks

    filler = tokenizer.encode(text[: LONGEST_TOKEN * length * needles])
    try:
        return haystacks(
            lambda s: tokenizer.encode(s, add_special_tokens=False), filler, length, needles
        )
    except ValueError as e:
        raise InputError(f"--needle {length} --needles {needles}: {e}") from e


def _agreement(
    model: nn.Module,
    tokens: Sequence[int],
    length: int,
    caches: Mapping[str, MakeCache],
    chunk: int,
    bars: Progress,
) -> dict[str, Agreement]:
    from ..agreement import agreement

    bar = _bar(bars, f"continuations of {length} tokens")
    return agreement(model, tokens, length, caches, prompts=_PROMPTS, chunk=chunk, progress=bar)


def _retrieve(
    model: nn.Module,
    stacks: Sequence[Haystack],
    caches: Mapping[str, MakeCache],
    chunk: int,
    bars: Progress,
) -> Retrieval:
    from ..needles import retrieve

    bar = _bar(bars, f"needles in {len(stacks[0].tokens)} tokens")
    return retrieve(model, stacks, caches, chunk=chunk, progress=bar)


def _caches(model: nn.Module, names: Sequence[str]) -> dict[str, MakeCache]:
    """What to compare with the model's own cache. Fails now if a codec does not fit the model."""
    from ..adapters.programs import MakePromptCache
    from ..evaluation import quantized_caches

    caches = quantized_caches(model)
    for name in names:
        make = MakePromptCache(name)
        make(model)
        caches[name if name in PRESETS else Path(name).stem] = partial(make, model)
    return caches


def _dtype(model: nn.Module) -> str:
    """What the model's own cache holds, read off after one token."""
    import mlx.core as mx

    from ..evaluation import stock_cache

    cache = stock_cache(model)
    mx.eval(model(mx.zeros((1, 1), mx.int32), cache=cache))
    kinds = {str(c.keys.dtype) for c in cache if getattr(c, "keys", None) is not None}
    return "/".join(sorted(k.removeprefix("mlx.core.") for k in kinds)) or "uncompressed"
