"""What a macOS extension module needs from libmlx.dylib, and whether libmlx exports it.

A symbol that MLX's headers declare but its library does not export compiles and links with
``-undefined dynamic_lookup`` and fails only when the module is imported on a Mac.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import lief

lief.logging.disable()

_MLX = ("__ZN3mlx", "__ZNK3mlx", "__ZTIN3mlx", "__ZTVN3mlx", "__ZTSN3mlx")
TARGET = (14, 0)


@dataclass
class Audit:
    """Findings about one module."""

    module: Path
    mlx_symbols: int = 0
    faults: list[str] = field(default_factory=list)


def _demangle(names: list[str]) -> list[str]:
    try:
        out = subprocess.run(
            ["c++filt"], input="\n".join(n[1:] for n in names), text=True, capture_output=True
        )
    except FileNotFoundError:
        return names
    return out.stdout.splitlines()


def undefined(binary: lief.MachO.Binary) -> set[str]:
    """Names the binary uses but does not define."""
    return {str(s.name) for s in binary.imported_symbols}


def missing_exports(binary: lief.MachO.Binary, library: lief.MachO.Binary) -> list[str]:
    """Undefined MLX symbols of the binary that the library does not export, demangled."""
    exported = {str(s.name) for s in library.exported_symbols}
    needed = sorted(n for n in undefined(binary) if n.startswith(_MLX))
    return _demangle([n for n in needed if n not in exported])


def audit(module: Path, libmlx: Path) -> Audit:
    """Check symbols, the module's entry point, its deployment target and its run paths."""
    binary, library = lief.MachO.parse(str(module)).at(0), lief.MachO.parse(str(libmlx)).at(0)
    result = Audit(module, sum(n.startswith(_MLX) for n in undefined(binary)))
    for name in missing_exports(binary, library):
        result.faults.append(f"libmlx.dylib does not export {name}")
    if result.mlx_symbols == 0:
        result.faults.append("no symbol of MLX is used: this cannot be the extension")
    if "_PyInit__ext" not in {str(s.name) for s in binary.exported_symbols}:
        result.faults.append("the module does not export _PyInit__ext")
    minos = tuple(binary.build_version.minos[:2]) if binary.has_build_version else None
    if minos != TARGET:
        result.faults.append(f"the deployment target must be {TARGET}, but is {minos}")
    rpaths = [str(r.path) for r in binary.rpaths]
    if rpaths != ["@loader_path/../mlx/lib"]:
        result.faults.append(f"the run path must be @loader_path/../mlx/lib, but is {rpaths}")
    return result
