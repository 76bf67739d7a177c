#!/usr/bin/env python3
"""Print what the package needs to be built and run, with the extras named on the command line, one
requirement a line, for ``pip install -r``: a build without isolation is an incremental one."""

import sys
import tomllib
from pathlib import Path


def requirements(extras: list[str]) -> list[str]:
    pyproject = Path(__file__).resolve().parents[1] / "pyproject.toml"
    data = tomllib.loads(pyproject.read_text())
    project = data["project"]
    found = [*data["build-system"]["requires"], *project["dependencies"]]
    for extra in extras:
        found += project["optional-dependencies"][extra]
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
