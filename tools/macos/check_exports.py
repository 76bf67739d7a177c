#!/usr/bin/env python3
"""Check what an arm64 macOS extension module needs at load time, on any machine.

A symbol that MLX's headers declare but libmlx.dylib does not export, or a source file left out of
the build, links with ``-undefined dynamic_lookup`` and fails only when a Mac imports the module.

usage: check_exports.py MODULE LIBMLX_DYLIB [MLX_CORE_MODULE]
Exit code: 0 if the module is sound, 1 if not.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import lief

lief.logging.disable()

TARGET = (14, 0)  # PIN: the oldest macOS of mlx's wheels
RPATHS = ["@loader_path/../mlx/lib"]
# mlx::core, anywhere in a mangled name, and metal-cpp, whose constants live in libmlx
_MLX = re.compile(r"3mlx4core|^__Z\w*?N(2NS|3MTL|4MTL4|2CA)\d")
# what the interpreter and the frameworks that libmlx loads provide
_AT_RUN_TIME = re.compile(r"__?Py|_(objc|sel|class|object)_|_OBJC_CLASS_\$_")
_NANOBIND_KEY = re.compile(rb"nanobind_[a-z]\w*_v\d+\w*")
_LIBCXX = "/usr/lib/libc++.1.dylib"
_DYNAMIC_LOOKUP = -2  # BIND_SPECIAL_DYLIB_FLAT_LOOKUP


@dataclass
class Report:
    """Findings about one module."""

    mlx_symbols: int
    faults: list[str] = field(default_factory=list)


def demangle(names: list[str]) -> list[str]:
    try:
        out = subprocess.run(
            ["c++filt"], input="\n".join(n[1:] for n in names), text=True, capture_output=True
        )
    except FileNotFoundError:
        return names
    return out.stdout.splitlines()


def needed(binary: lief.MachO.Binary) -> dict[str, bool]:
    """Names the binary uses but does not define; true for those that no linked library provides."""
    names = {}
    defined = {str(s.name) for s in binary.exported_symbols}  # weak ones are imported as well
    for s in binary.imported_symbols:
        if str(s.name) in defined:
            continue
        binding = s.binding_info
        names[str(s.name)] = binding is None or binding.library_ordinal == _DYNAMIC_LOOKUP
    return names


def nanobind_keys(path: Path) -> set[str]:
    """The keys under which a module shares nanobind's type tables with others."""
    return {key.decode() for key in _NANOBIND_KEY.findall(path.read_bytes())}


def parse(path: Path) -> lief.MachO.Binary:
    binary = lief.parse(str(path))
    if not isinstance(binary, lief.MachO.Binary):
        raise SystemExit(f"{path} is not a Mach-O file")
    return binary


def audit(module: Path, libmlx: Path, mlx_core: Path | None = None) -> Report:
    """Check symbols, entry point, deployment target, run paths and, against mlx.core, nanobind."""
    binary, library = parse(module), parse(libmlx)  # lief's iterators do not keep them alive
    exported = {str(s.name) for s in library.exported_symbols}
    names = needed(binary)
    of_mlx = sorted(n for n in names if _MLX.search(n))
    missing = [n for n in of_mlx if n not in exported]
    unresolved = sorted(
        n for n, free in names.items() if free and n not in of_mlx and not _AT_RUN_TIME.match(n)
    )

    report = Report(len(of_mlx))
    report.faults += [f"libmlx.dylib does not export {n}" for n in demangle(missing)]
    report.faults += [f"nothing defines {n}" for n in demangle(unresolved)]
    if not of_mlx:
        report.faults.append("no symbol of MLX is used: this cannot be the extension")
    if "_PyInit__ext" not in {str(s.name) for s in binary.exported_symbols}:
        report.faults.append("the module does not export _PyInit__ext")
    version = binary.build_version
    minos = tuple(version.minos[:2]) if version else None
    if minos != TARGET:
        report.faults.append(f"the deployment target must be {TARGET}, but is {minos}")
    rpaths = [str(r.path) for r in binary.rpaths]
    if rpaths != RPATHS:
        report.faults.append(f"the run paths must be {RPATHS}, but are {rpaths}")
    for name in (str(lib.name) for lib in binary.libraries):  # a dylib's own name among them
        if not name.startswith(("@rpath/", "/usr/lib/", "/System/Library/")):
            report.faults.append(f"the module loads {name}")
    if _LIBCXX not in {str(lib.name) for lib in binary.libraries}:
        # the types of exceptions would not be those that libmlx throws
        report.faults.append(f"the module must load {_LIBCXX}")
    if not binary.has_code_signature:
        report.faults.append("the module has no signature, without which a Mac does not load it")
    if mlx_core is not None:
        own, mlx = nanobind_keys(module), nanobind_keys(mlx_core)
        if own != mlx:
            report.faults.append(f"nanobind's key must be mlx.core's {mlx}, but is {own}")
    return report


def main() -> int:
    if len(sys.argv) not in (3, 4):
        print(__doc__, file=sys.stderr)
        return 2
    report = audit(*map(Path, sys.argv[1:]))
    print(f"{Path(sys.argv[1]).name}: {report.mlx_symbols} symbols of MLX")
    print("\n".join(report.faults) or "no faults")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
