"""``vqkv chat``: mlx_lm.chat with a compressed cache."""

from __future__ import annotations

import argparse
from typing import Any

from . import programs


def add(commands: Any) -> None:
    programs.add(commands, "chat", "mlx_lm.chat", "a conversation, as in mlx_lm.chat", run)


def run(args: argparse.Namespace) -> None:
    programs.run(args, ("--max-kv-size",))
