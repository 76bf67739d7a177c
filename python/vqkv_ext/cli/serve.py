"""``vqkv serve``: mlx_lm.server with compressed caches."""

from __future__ import annotations

import argparse
from typing import Any

from . import programs
from .common import require


def add(commands: Any) -> None:
    programs.add(commands, "serve", "mlx_lm.server", "an HTTP server, that of mlx_lm", run)


def run(args: argparse.Namespace) -> None:
    require("mlx_lm")
    from ..adapters.server import robust

    with robust():
        programs.run(args, ("--kv-bits",))
