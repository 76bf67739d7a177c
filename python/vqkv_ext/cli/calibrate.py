"""``vqkv calibrate``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..codecs.vecinfer import PRESETS
from .common import at_least, check_output, first_tokens, load_model, read_text, require

if TYPE_CHECKING:
    from ..codecs import Calibration

_LEAST_TOKENS = 256


def add(commands: Any) -> None:
    fit = commands.add_parser(
        "calibrate",
        help="fit a codec to a model",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
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
        default=argparse.SUPPRESS,  # else the help says "default: None"
        help="the .safetensors file to write",
    )
    fit.add_argument("--preset", default="vecinfer-2bit", choices=tuple(PRESETS), help="the codec")
    fit.add_argument(
        "--tokens", type=at_least(_LEAST_TOKENS), default=2048, help="first tokens of the text"
    )
    fit.add_argument("--iterations", type=at_least(1), default=30, help="rounds of k-means")
    fit.add_argument("--seed", type=at_least(0), default=0, help="of k-means")
    fit.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    target = Path(args.output)
    check_output(target, ".safetensors", (args.model, args.text))
    require("mlx_lm")
    require("rich")
    from rich.console import Console
    from rich.progress import Progress

    from ..adapters.calibrate import calibrate

    text = read_text(args.text)
    errors = Console(stderr=True)
    with errors.status(f"loading {args.model}"):
        model, tokenizer = load_model(args.model)
    tokens = first_tokens(tokenizer, text, args.text, args.tokens, _LEAST_TOKENS)
    with Progress(console=errors, transient=True) as bars:
        reading = bars.add_task(f"running {len(tokens)} tokens", total=len(tokens))
        fitting = bars.add_task("fitting layers", total=None, start=False)

        def fitted(done: int, total: int) -> None:
            bars.update(fitting, completed=done, total=total)

        def read(done: int, total: int) -> None:
            bars.update(reading, completed=done, total=total)
            if done == total:
                bars.start_task(fitting)

        calibration = calibrate(
            model,
            tokens,
            args.preset,
            iterations=args.iterations,
            seed=args.seed,
            reading=read,
            progress=fitted,
        )
    calibration.save(target)
    print(_summary(target, calibration))


def _summary(target: Path, calibration: Calibration) -> str:
    shape, layers = calibration.shape, calibration.layers
    coded = shape.kv_heads * sum(x.key.bytes_per_token + x.value.bytes_per_token for x in layers)
    plain = 2 * shape.layers * shape.kv_heads * (shape.key_dim + shape.value_dim)
    held = sum(x.key.nbytes + x.value.nbytes for x in layers)
    return (
        f"{target}: {calibration.preset} for {shape.layers} layers of {shape.model_type}, fitted "
        f"to {calibration.tokens} tokens\n"
        f"codecs: {held:,} bytes, shared by all caches of the model\n"
        f"each token beyond the windows: {coded:,.0f} bytes; float16 takes {plain:,} "
        f"({plain / coded:.1f}x)"
    )
