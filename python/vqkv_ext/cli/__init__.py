"""The ``vqkv`` command; each of its commands is a module here."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from . import bench, calibrate, chat, evaluate, generate, info, serve
from .common import InputError, Parser

__all__ = ["main"]


def _parser() -> Parser:
    parser = Parser(prog="vqkv", description="Compressed KV caches for MLX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (generate, chat, serve, calibrate, evaluate, bench, info):
        command.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit code: 0, 2 for input that cannot be used, 1 for work that failed.
    """
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if hasattr(args, "mlx_lm"):  # a program of mlx_lm, which takes what is not ours
        args.rest = rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        args.run(args)
    except (InputError, ValueError, FileNotFoundError) as e:
        return _failed(args.command, e, 2)
    except (OSError, RuntimeError, ImportError) as e:
        return _failed(args.command, e, 1)
    except KeyboardInterrupt:
        return 130
    return 0


def _failed(command: str, error: Exception, code: int) -> int:
    print(f"vqkv {command}: {' '.join(str(error).split())}", file=sys.stderr)
    return code
