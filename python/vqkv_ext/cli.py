"""The ``vqkv`` command."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import mlx.core as mx

from .codecs.vecinfer import PRESETS
from .info import info

if TYPE_CHECKING:
    from .codecs import Calibration

_LEAST_TOKENS = 256
_LONGEST_TOKEN = 40  # characters, on average; what lies beyond need not be tokenised


class _InputError(Exception):
    """Something the caller can mend; shown as one line."""


class _Parser(argparse.ArgumentParser):
    """Errors in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _at_least(least: int) -> Any:
    def convert(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, but got {value}")
        return value

    convert.__name__ = "int"  # argparse names the type in its own message
    return convert


def _load_model(name: str) -> tuple[Any, Any]:
    """A model and its tokenizer, from a GGUF file or whatever mlx_lm loads."""
    try:
        import mlx_lm

        from .adapters.gguf import load_gguf
    except ModuleNotFoundError as e:
        raise _InputError(f'{e.name} is missing: pip install "vqkv-ext[lm]"') from e
    if not Path(name).exists() and (name.count("/") != 1 or name[0] in "./~"):
        raise _InputError(
            f"{name} is neither a directory, a .gguf file nor a model's full name (owner/name)"
        )
    try:
        if name.endswith(".gguf"):
            # expanded weights run through BLAS; a GPU reads the quantised ones faster
            return load_gguf(name, dequantize=mx.default_device().type == mx.DeviceType.cpu)
        return mlx_lm.load(name)[:2]
    except Exception as e:  # mlx_lm, transformers and the hub raise nearly everything
        raise _InputError(f"cannot load {name}: {e or type(e).__name__}") from e


def _read_text(name: str) -> str:
    if name == "builtin":
        from .evaluation import calibration_text

        return calibration_text()
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise _InputError(f"cannot read {name} as UTF-8 text: {e}") from e


def _check_output(target: Path, inputs: Sequence[str]) -> None:
    """Fail now rather than after minutes of work."""
    if target.suffix != ".safetensors":
        raise _InputError(f"the output must end in .safetensors, but got {target.name!r}")
    if target.is_dir():
        raise _InputError(f"the output must be a file, but {target} is a directory")
    if target.exists() and any(os.path.exists(i) and os.path.samefile(i, target) for i in inputs):
        raise _InputError(f"the output {target} is also an input")
    try:
        # what the permissions promise is not always so: read-only mounts, root
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as e:
        raise _InputError(f"cannot write to {target.parent}: {e.strerror}") from e


def _info(args: argparse.Namespace) -> None:
    facts = info()
    if args.json:
        print(json.dumps(facts))
        return
    width = max(map(len, facts))
    for key, value in facts.items():
        print(f"{key:{width}}  {'-' if value is None else value}")


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


def _calibrate(args: argparse.Namespace) -> None:
    target = Path(args.output)
    _check_output(target, (args.model, args.text))
    try:
        from rich.console import Console
        from rich.progress import Progress

        from .adapters.calibrate import calibrate
    except ModuleNotFoundError as e:
        raise _InputError(f'{e.name} is missing: pip install "vqkv-ext[lm]"') from e
    text = _read_text(args.text)
    errors = Console(stderr=True)
    with errors.status(f"loading {args.model}"):
        model, tokenizer = _load_model(args.model)
    tokens = tokenizer.encode(text[: _LONGEST_TOKEN * args.tokens])[: args.tokens]
    if len(tokens) < _LEAST_TOKENS:
        raise _InputError(
            f"{args.text} must have at least {_LEAST_TOKENS} tokens, but has {len(tokens)}"
        )
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


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="vqkv", description="Compressed KV caches for MLX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    about = commands.add_parser("info", help="versions, device and kernels, for bug reports")
    about.add_argument("--json", action="store_true", help="as one JSON object")
    about.set_defaults(run=_info)

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
        "--tokens", type=_at_least(_LEAST_TOKENS), default=2048, help="first tokens of the text"
    )
    fit.add_argument("--iterations", type=_at_least(1), default=30, help="rounds of k-means")
    fit.add_argument("--seed", type=_at_least(0), default=0, help="of k-means")
    fit.set_defaults(run=_calibrate)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code, 2 for input that cannot be used."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except (_InputError, ValueError, OSError, RuntimeError) as e:
        print(f"vqkv {args.command}: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
