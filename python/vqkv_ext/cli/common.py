"""What the commands share: errors, arguments, models and texts."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

LONGEST_TOKEN = 40  # characters, on average; what lies beyond need not be tokenised


class InputError(Exception):
    """Something the caller can mend; shown as one line, exit code 2."""


class Parser(argparse.ArgumentParser):
    """Errors in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


class Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Help that ends with the default, as it would be typed; without one where there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        given = action.default
        if given is None or given is False or given == ():
            return action.help
        if isinstance(given, (list, tuple)):
            return f"{action.help} (default: {' '.join(map(str, given))})"
        return super()._get_help_string(action)


def at_least(least: int) -> Any:
    """A type of argparse: integers from ``least``."""

    def convert(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, but got {value}")
        return value

    convert.__name__ = "int"  # argparse names the type in its own message
    return convert


def require(name: str, extra: str = "lm") -> ModuleType:
    """A module that an extra of the package brings.

    Raises:
        InputError: It, or what it imports, is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        raise InputError(f'{e.name} is missing: pip install "vqkv-ext[{extra}]"') from e


def load_model(name: str) -> tuple[Any, Any]:
    """A model and its tokenizer, from a GGUF file or whatever mlx_lm loads."""
    mlx_lm = require("mlx_lm")
    if not Path(name).exists() and (name.count("/") != 1 or name[0] in "./~"):
        raise InputError(
            f"{name} is neither a directory, a .gguf file nor a model's full name (owner/name)"
        )
    try:
        if name.endswith(".gguf"):
            from ..adapters.gguf import best_expanded, load_gguf

            return load_gguf(name, dequantize=best_expanded())
        return mlx_lm.load(name)[:2]
    except Exception as e:  # mlx_lm, transformers and the hub raise nearly everything
        raise InputError(f"cannot load {name}: {e or type(e).__name__}") from e


def read_text(name: str) -> str:
    """The text of a file, of standard input (``-``), or the one that ships (``builtin``)."""
    if name == "builtin":
        from ..evaluation import calibration_text

        return calibration_text()
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"cannot read {name} as UTF-8 text: {e}") from e


def first_tokens(tokenizer: Any, text: str, name: str, most: int, least: int) -> list[int]:
    """The first ``most`` tokens of the text called ``name``.

    Raises:
        InputError: There are fewer than ``least``.
    """
    tokens = tokenizer.encode(text[: LONGEST_TOKEN * most])[:most]
    if len(tokens) < least:
        raise InputError(f"{name} must have at least {least} tokens, but has {len(tokens)}")
    return tokens


def check_output(target: Path, suffix: str, inputs: Sequence[str]) -> None:
    """Fail now rather than after minutes of work."""
    if target.suffix != suffix:
        raise InputError(f"the output must end in {suffix}, but got {target.name!r}")
    if target.is_dir():
        raise InputError(f"the output must be a file, but {target} is a directory")
    if target.exists() and any(os.path.exists(i) and os.path.samefile(i, target) for i in inputs):
        raise InputError(f"the output {target} is also an input")
    try:
        # what the permissions promise is not always so: read-only mounts, root
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as e:
        raise InputError(f"cannot write to {target.parent}: {e.strerror}") from e
