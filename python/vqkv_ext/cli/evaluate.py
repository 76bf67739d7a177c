"""``vqkv eval``."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..codecs.presets import DEFAULT, PRESETS
from ..info import info
from .common import (
    InputError,
    at_least,
    check_output,
    first_tokens,
    load_model,
    read_text,
    require,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import mlx.nn as nn

    from ..evaluation import MakeCache, Quality

_LEAST_TOKENS = 2


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="how much compressed caches change a model's predictions",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
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
    require("mlx_lm")
    require("rich")
    import mlx.core as mx
    from rich.console import Console
    from rich.progress import Progress

    from ..evaluation import compare

    text = read_text(args.text)
    errors = Console(stderr=True)
    with errors.status(f"loading {args.model}"):
        model, tokenizer = load_model(args.model)
    if hasattr(args, "dtype"):
        model.set_dtype(getattr(mx, args.dtype))
    tokens = first_tokens(tokenizer, text, args.text, args.tokens, _LEAST_TOKENS)
    caches = _caches(model, args.kv)
    with Progress(console=errors, transient=True) as bars:
        task = bars.add_task(f"{len(tokens)} tokens, {len(caches) + 1} caches", total=len(tokens))
        quality = compare(
            model,
            tokens,
            caches,
            chunk=args.chunk,
            progress=lambda done, _: bars.update(task, completed=done),
        )
    plain = f"{_dtype(model)} (mlx-lm)"
    if plot is not None:
        from ..plotting import plot_quality

        points = {name: (q.cache_bytes, q.kl) for name, q in quality.items()}
        plot_quality(points, plot, title=f"{Path(args.model).name}, {len(tokens)} tokens")
    if args.json:
        print(json.dumps(_facts(args, len(tokens), plain, quality)))
    else:
        _show(args, len(tokens), plain, quality)


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


def _facts(
    args: argparse.Namespace, tokens: int, plain: str, quality: Mapping[str, Quality]
) -> dict[str, Any]:
    first = next(iter(quality.values()))
    return {
        "info": info(),
        "model": args.model,
        "text": args.text,
        "tokens": tokens,
        "chunk": args.chunk,
        "reference": {
            "name": plain,
            "ppl": first.to_dict()["ppl_reference"],
            "cache_bytes": first.reference_bytes,
        },
        "caches": {name: q.to_dict() for name, q in quality.items()},
    }


def _show(
    args: argparse.Namespace, tokens: int, plain: str, quality: Mapping[str, Quality]
) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        title=escape(f"{args.model}, {args.text}: {tokens} tokens in chunks of {args.chunk}"),
        caption="KL to the uncompressed cache in nats per token; bytes: all arrays that the cache "
        "holds after the text, spare capacity included",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("cache", no_wrap=True)
    for column in ("bytes", "", "KL", "top-1", "perplexity", ""):
        table.add_column(column, justify="right", no_wrap=True)
    first = next(iter(quality.values()))
    table.add_row(plain, f"{first.reference_bytes:,}", "", "", "", f"{first.ppl_reference:.4g}", "")
    for name, q in quality.items():
        table.add_row(
            escape(name),
            f"{q.cache_bytes:,}",
            f"1/{q.reference_bytes / q.cache_bytes:.1f}",
            f"{q.kl:.2g}",
            f"{100 * q.top1:.1f} %",
            f"{q.ppl:.4g}",
            f"{q.delta_ppl:+.1f} %",
        )
    Console().print(table)
