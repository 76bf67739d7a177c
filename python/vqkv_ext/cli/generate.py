"""``vqkv generate``: mlx_lm.generate with a compressed cache."""

from __future__ import annotations

import argparse
from typing import Any

from . import programs


def add(commands: Any) -> None:
    programs.add(commands, "generate", "mlx_lm.generate", "text, as of mlx_lm.generate", run)


def run(args: argparse.Namespace) -> None:
    refused = ("--kv-bits", "--max-kv-size", "--prompt-cache-file")
    programs.run(args, refused)
