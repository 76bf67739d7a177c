"""``vqkv info``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..info import info


def add(commands: Any) -> None:
    about = commands.add_parser("info", help="versions, device and kernels, for bug reports")
    about.add_argument("--json", action="store_true", help="as one JSON object")
    about.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    facts = info()
    if args.json:
        print(json.dumps(facts))
        return
    width = max(map(len, facts))
    for key, value in facts.items():
        print(f"{key:{width}}  {'-' if value is None else value}")
