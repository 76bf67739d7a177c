#!/usr/bin/env python3
"""Print what the package needs to be built and run, with the extras named on the command line, one
requirement a line, for ``pip install -r``: a build without isolation is an incremental one. With
``--only`` first, the extras alone."""

import sys
import tomllib
from pathlib import Path


def requirements(extras: list[str], *, only: bool = False) -> list[str]:
    pyproject = Path(__file__).resolve().parents[1] / "pyproject.toml"
    data = tomllib.loads(pyproject.read_text())
    project = data["project"]
    found = [] if only else [*data["build-system"]["requires"], *project["dependencies"]]
    for extra in extras:
        found += project["optional-dependencies"][extra]
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    only = sys.argv[1:2] == ["--only"]
    print("\n".join(requirements(sys.argv[1 + only :], only=only)))
