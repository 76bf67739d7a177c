"""Programs of mlx_lm, run with its own code and arguments but compressed caches."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ..codecs.presets import DEFAULT
from .common import InputError, require


def add(commands: Any, name: str, module: str, help: str, run: Any) -> None:
    """A command whose arguments, other than ``--kv``, are those of a module of mlx_lm."""
    parser = commands.add_parser(
        name,
        help=help,
        add_help=False,
        allow_abbrev=False,  # `--k` is not ours to complete
    )
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--kv", metavar="PRESET|FILE", default=DEFAULT)
    parser.set_defaults(run=run, mlx_lm=module)


def run(args: argparse.Namespace, refused: Sequence[str]) -> None:
    """Run the program.

    Args:
        args: With ``kv``, ``help``, ``mlx_lm`` and what is left over in ``rest``.
        refused: Options of the program that a compressed cache has no use for.

    Raises:
        InputError: One of these was given, or a GGUF file; or mlx_lm is missing.
    """
    if args.help:
        print(
            f"--kv PRESET|FILE      how caches are compressed: a preset or a file of\n"
            f"                      `vqkv calibrate` (default: {DEFAULT})\n\n"
            f"The other arguments are those of {args.mlx_lm}:\n",
            flush=True,
        )
        args.rest = ["--help"]
    for option in refused:
        if any(a == option or a.startswith(f"{option}=") for a in args.rest):
            raise InputError(f"{option} must not be given: --kv decides how the cache is stored")
    for model in _values("--model", args.rest):
        if model.endswith(".gguf"):
            raise InputError(
                f"--model must be what mlx_lm.load takes, but got {model}; only `vqkv eval` and "
                "`vqkv calibrate` read GGUF files"
            )
    require("mlx_lm")
    program = importlib.import_module(args.mlx_lm)
    from ..adapters.programs import compressed_caches

    with _arguments(f"vqkv {args.command}", args.rest), compressed_caches(args.kv):
        try:
            program.main()
        except (InputError, ValueError, OSError, RuntimeError):
            raise
        except Exception as e:  # mlx_lm, transformers and the hub raise nearly everything
            raise RuntimeError(f"{type(e).__name__}: {e}") from e


def _values(option: str, rest: Sequence[str]) -> list[str]:
    """What an option was given, as ``--option VALUE`` or ``--option=VALUE``."""
    apart = [value for name, value in itertools.pairwise(rest) if name == option]
    return apart + [a.removeprefix(f"{option}=") for a in rest if a.startswith(f"{option}=")]


@contextlib.contextmanager
def _arguments(program: str, rest: Sequence[str]) -> Iterator[None]:
    """``sys.argv`` for a program that parses it."""
    before = sys.argv
    sys.argv = [program, *rest]
    try:
        yield
    finally:
        sys.argv = before
