"""Write all kernels as one Metal source, for machines without a Metal compiler at build time.

usage: amalgamate.py METAL_DIR OUTPUT

Project headers are inlined once; headers of the mappings to other executors (compat/) are left out,
as are system headers, which the Metal run-time compiler provides.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_INCLUDE = re.compile(r'\s*#\s*include\s*"([^"]+)"')


def inline(path: Path, root: Path, seen: set[Path]) -> list[str]:
    """Lines of a file with its project headers in their place, each the first time it is met."""
    if path in seen:
        return []
    seen.add(path)
    lines = []
    for line in path.read_text().splitlines():
        found = _INCLUDE.match(line)
        if found is None:
            if line.strip() != "#pragma once":
                lines.append(line)
            continue
        header = (path.parent / found[1]).resolve()
        if not header.is_file():
            raise SystemExit(f"{path} includes {found[1]}, which does not exist")
        if not header.is_relative_to(root / "compat"):
            lines += inline(header, root, seen)
    return lines


def amalgamate(root: Path) -> str:
    """The source of all ``*.metal`` files of a directory."""
    root = root.resolve()
    seen: set[Path] = set()
    lines: list[str] = []
    for path in sorted(root.glob("*.metal")):
        lines += [f"// ---- {path.name}", *inline(path, root, seen)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(amalgamate(Path(sys.argv[1])))
