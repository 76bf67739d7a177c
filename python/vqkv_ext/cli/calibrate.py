"""``vqkv calibrate``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..codecs.presets import PRESETS as FREE
from ..codecs.query_aware import PRESETS as QUERY_AWARE
from ..codecs.vecinfer import PRESETS as VECINFER
from .common import (
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
    from rich.table import Table

    from ..codecs import Calibration

_LEAST_TOKENS = 256
_FITTED = "query-aware-2bit"
_TOKENS = {"fit": 2048, "allocate": 1024}


def add(commands: Any) -> None:
    fit = commands.add_parser(
        "calibrate",
        help="fit a codec to a model, or share out bits among its layers",
        formatter_class=Defaults,
    )
    fit.add_argument("model", metavar="MODEL", help="what mlx_lm.load takes, or a .gguf file")
    fit.add_argument(
        "text", metavar="TEXT", help="a UTF-8 file, - for standard input, or builtin (English)"
    )
    fit.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        required=True,
        help="the .safetensors file to write",
    )
    how = fit.add_mutually_exclusive_group()
    how.add_argument(
        "--preset",
        default=argparse.SUPPRESS,
        choices=(*VECINFER, *QUERY_AWARE),
        help=f"the codec to fit (default: {_FITTED})",
    )
    how.add_argument(
        "--budget",
        type=_positive,
        metavar="BITS",
        default=argparse.SUPPRESS,
        help="instead choose a preset for the keys and for the values of each layer, by measured "
        "KL, for at most so many stored bits per number",
    )
    fit.add_argument(
        "--candidates",
        nargs="+",
        choices=(*FREE, *QUERY_AWARE),
        metavar="PRESET",
        default=argparse.SUPPRESS,
        help="with --budget: the presets to choose from; query-aware ones have keys fitted to the "
        "text, and trellis codes of the same size for values (default: query-aware ones of all "
        "sizes, or trellis ones where the heads have no Hadamard matrix)",
    )
    fit.add_argument(
        "--tokens",
        type=at_least(_LEAST_TOKENS),
        default=argparse.SUPPRESS,
        help="first tokens of the text (default: {fit}, or {allocate} with --budget)".format(
            **_TOKENS
        ),
    )
    fit.add_argument(
        "--iterations", type=at_least(1), default=30, help="rounds of k-means (vecinfer)"
    )
    fit.add_argument("--seed", type=at_least(0), default=0, help="of k-means (vecinfer)")
    fit.set_defaults(run=run)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 16:
        raise argparse.ArgumentTypeError(f"must be between 0 and 16, but got {text}")
    return value


def run(args: argparse.Namespace) -> None:
    target = Path(args.output)
    check_output(target, ".safetensors", (args.model, args.text))
    require("mlx_lm")
    require("rich")
    from rich.console import Console
    from rich.progress import Progress

    budget = getattr(args, "budget", None)
    most = getattr(args, "tokens", _TOKENS["fit" if budget is None else "allocate"])
    text = read_text(args.text)
    errors = Console(stderr=True)
    with errors.status(f"loading {args.model}"):
        model, tokenizer = load_model(args.model)
    tokens = first_tokens(tokenizer, text, args.text, most, _LEAST_TOKENS)
    if budget is not None:
        from ..adapters.allocate import check_budget, default_candidates
        from ..adapters.mlx_lm import model_shape

        try:
            shape = model_shape(model)
            candidates = getattr(args, "candidates", default_candidates(shape))
            check_budget(shape, budget, candidates)
        except ValueError as e:
            raise InputError(f"--budget {budget:g}: {e}") from e
    with Progress(console=errors, transient=True) as bars:
        reading = bars.add_task(f"running {len(tokens)} tokens", total=len(tokens))
        what = "fitting layers" if budget is None else "measuring keys and values of layers"
        fitting = bars.add_task(what, total=None, start=False)

        def fitted(done: int, total: int) -> None:
            bars.update(fitting, completed=done, total=total)

        def read(done: int, total: int) -> None:
            bars.update(reading, completed=done, total=total)
            if done == total:
                bars.start_task(fitting)

        if budget is None:
            from ..adapters.calibrate import calibrate

            calibration = calibrate(
                model,
                tokens,
                getattr(args, "preset", _FITTED),
                iterations=args.iterations,
                seed=args.seed,
                reading=read,
                progress=fitted,
            )
        else:
            from ..adapters.allocate import allocate

            calibration = allocate(
                model,
                tokens,
                budget,
                candidates=candidates,
                reading=read,
                progress=fitted,
            )
    calibration.save(target)
    print(_summary(target, calibration))
    if budget is not None:
        Console().print(_choices(calibration))


def _summary(target: Path, calibration: Calibration) -> str:
    shape, layers = calibration.shape, calibration.layers
    coded = shape.kv_heads * sum(x.key.bytes_per_token + x.value.bytes_per_token for x in layers)
    plain = 2 * shape.layers * shape.kv_heads * (shape.key_dim + shape.value_dim)
    codecs = {id(c): c for x in layers for c in (x.key, x.value)}  # layers may share them
    held = sum(c.nbytes for c in codecs.values())
    return (
        f"{target}: {calibration.preset} for {shape.layers} layers of {shape.model_type}, fitted "
        f"to {calibration.tokens} tokens\n"
        f"codecs: {held:,} bytes, shared by all caches of the model\n"
        f"each token beyond the windows: {coded:,.0f} bytes; float16 takes {plain:,} "
        f"({plain / coded:.1f}x)"
    )


def _choices(calibration: Calibration) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("layer", "keys", "values"):
        table.add_column(column)
    for i, layer in enumerate(calibration.layers):
        table.add_row(str(i), layer.key.name, layer.value.name)
    return table
