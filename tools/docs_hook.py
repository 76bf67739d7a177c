"""mkdocs: pages that need not be there are linked where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

OPTIONAL = {"quality.md": ("Quality, measured", "evaluation.md")}
"""File name to title and the page it comes after."""


def on_config(config: Any) -> Any:
    pages = {path: i for i, entry in enumerate(config.nav) for path in entry.values()
             if isinstance(path, str)}  # fmt: skip
    for name, (title, after) in OPTIONAL.items():
        if (Path(config.docs_dir) / name).is_file():
            config.nav.insert(pages[after] + 1, {title: name})
    return config
