#!/usr/bin/env python3
"""Compile the extension's host code, Metal backend included, for arm64 macOS on any machine, link
it against the real libmlx.dylib, and check what it needs from there (check_exports.py).

The compiler is the clang in the ``ziglang`` package, with its macOS headers and the stubs in shim/.
It keeps objects by the hash of all they depend on, so a second run takes a second or two.
Exit code: 0 if the module is sound, 1 if not.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nanobind
from check_exports import RPATHS, TARGET, audit, parse
from python_headers import include_folder

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
ZIG = [sys.executable, "-m", "ziglang", "c++", "-target"]
ZIG += ["aarch64-macos." + ".".join(map(str, TARGET))]
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_NOT_FAMILIES = ("backend", "cpu", "simulator")
_OF_A_MAC = ("backend/metal.cpp", "backend/sim.cpp", "cpu/dispatch.cpp", "cpu/variant_baseline.cpp")


def pinned_mlx() -> str:
    """The mlx version that pyproject.toml pins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for requirement in project["project"]["dependencies"]:
        if found := re.match(r"mlx==([\d.]+)", requirement):
            return found[1]
    raise SystemExit("pyproject.toml pins no mlx version")


def package_folder(version: str, cache: Path) -> Path:
    return cache / f"mlx-{version}-macos-{PYTHON}" / "mlx"


def _download(target: Path, python: str, wheels: list[str]) -> None:
    """Unpack wheels of a Mac into a folder, once."""
    if target.exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
        command += ["--only-binary=:all:", "--platform", "macosx_14_0_arm64"]
        subprocess.run([*command, "--python-version", python, *wheels], check=True)
        part = target.with_name(f"{target.name}.part{os.getpid()}")
        for wheel in Path(folder).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(part)
        part.rename(target)


def mlx_package(version: str, cache: Path) -> Path:
    """The mlx package of a Mac (headers, libmlx.dylib, mlx.core), downloaded once."""
    package = package_folder(version, cache)
    _download(package.parent, PYTHON, [f"mlx=={version}", f"mlx-metal=={version}"])
    return package


def mlx_core(version: str, cache: Path, python: str) -> Path:
    """The mlx.core module of a Mac for a version of Python, downloaded once."""
    package = package_folder(version, cache)
    if python != PYTHON:
        package = cache / f"mlx-{version}-macos-core-{python}" / "mlx"
        _download(package.parent, python, [f"mlx=={version}"])
    return next(package.glob("core.*.so"))


def sources() -> list[Path]:
    """Host sources of a macOS build, as CMakeLists.txt lists them."""
    families = [p for p in (ROOT / "csrc").glob("**/*.cpp") if p.parent.name not in _NOT_FAMILIES]
    return sorted(families) + [ROOT / "csrc" / name for name in _OF_A_MAC]


def includes(mlx: Path, python: Path | None = None) -> list[str]:
    """Flags for headers that are not the project's own; with CPython's for what needs them."""
    folders = [HERE / "shim", mlx / "include", mlx / "include" / "metal_cpp"]
    if python is not None:
        nanobind_headers = Path(nanobind.include_dir())
        robin_map = nanobind_headers.parent / "ext" / "robin_map" / "include"
        folders += [nanobind_headers, robin_map, python]
    return [x for folder in folders for x in ("-isystem", str(folder))]


def compile_one(source: Path, flags: list[str], build: Path) -> Path:
    """The object of one source; a RuntimeError with the compiler's messages if there is none."""
    name = source.relative_to(ROOT) if source.is_relative_to(ROOT) else Path(source.name)
    out = build / ("_".join(name.parts) + ".o")
    done = subprocess.run([*ZIG, *flags, "-c", source, "-o", out], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} does not compile for macOS:\n{done.stderr}")
    return out


# As a release build by CMake. zig says its libc++ goes into the module; the module takes that of
# macOS instead, so it must not use what that of the deployment target does not have.
_FLAGS = ["-std=c++20", "-O3", "-DNDEBUG", "-g0", "-fPIC", "-fblocks", "-fvisibility=hidden"]
_FLAGS += ["-fvisibility-inlines-hidden", "-D_METAL_", "-DNB_DOMAIN=mlx"]
_FLAGS += ["-U_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS"]
_FLAGS += ["-D_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS=1"]
_WARNINGS = ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror"]


def compile_all(
    mlx: Path, build: Path, jobs: int, pythons: dict[str, Path]
) -> dict[str, list[Path]]:
    """Objects of all sources and of nanobind for each version of Python, given with its headers.
    Sources other than bindings know nothing of Python and are compiled once."""
    flags = [*_FLAGS, f"-I{ROOT / 'csrc'}", f"-ffile-prefix-map={ROOT}=."]
    own = [*flags, f'-DVQKV_MLX_VERSION="{pinned_mlx()}"', *_WARNINGS]
    nanobind_source = Path(nanobind.source_dir()) / "nb_combined.cpp"
    bindings = [s for s in sources() if s.name == "bindings.cpp"]
    for name in ("host", *pythons):
        (build / name).mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        host = [
            pool.submit(compile_one, s, [*own, *includes(mlx)], build / "host")
            for s in sources()
            if s not in bindings
        ]
        each = {}
        for python, headers in pythons.items():
            more, folder = includes(mlx, headers), build / python
            each[python] = [
                pool.submit(compile_one, s, [*own, *more], folder) for s in bindings
            ] + [pool.submit(compile_one, nanobind_source, [*flags, *more, "-w"], folder)]
        return {p: [o.result() for o in (*host, *own)] for p, own in each.items()}


# Symbols the module uses of libc++ that MLX does not; all as old as macOS on arm64.
_MORE_OF_LIBCXX = (
    "__ZNSt11logic_errorC1EPKc",
    "__ZNSt11logic_errorD1Ev",
    "__ZNSt3__16thread6detachEv",
    "__ZTINSt3__112system_errorE",
    "__ZTISt11logic_error",
    "__ZdlPvm",
    "__ZdlPvmSt11align_val_t",
)
_WEAK_OF_LIBCXX = re.compile(r"__Zn|__Zd|__ZTISt")  # bound by name: operators new, exceptions
_LIBCXX = "/usr/lib/libc++.1.dylib"


def libcxx_stub(mlx: Path, build: Path) -> Path:
    """What the linker is told of macOS's libc++: the symbols that MLX, built by Apple's tools for
    the same deployment target, takes from there. zig would put its own libc++ into the module,
    which does not catch the exceptions that MLX throws."""
    names = set(_MORE_OF_LIBCXX)
    for path in (mlx / "lib" / "libmlx.dylib", next(mlx.glob("core.*.so"))):
        binary = parse(path)
        for s in binary.imported_symbols:
            library = s.binding_info.library if s.has_binding_info else None
            weak = library is None and _WEAK_OF_LIBCXX.match(str(s.name))
            if weak or (library is not None and library.name == _LIBCXX):
                names.add(str(s.name))
    lines = ["--- !tapi-tbd", "tbd-version: 4", "targets: [ arm64-macos ]"]
    lines += [f"install-name: '{_LIBCXX}'", "exports:", "  - targets: [ arm64-macos ]"]
    lines += [f"    symbols: [ {', '.join(sorted(names))} ]", "...", ""]
    out = build / "libc++.1.tbd"
    out.write_text("\n".join(lines))
    return out


def link(objects: list[Path], mlx: Path, build: Path, python: str = PYTHON) -> Path:
    """The module, with the interpreter's symbols left to the loader."""
    out = build / f"_ext.cpython-{python.replace('.', '')}-darwin.so"
    command = [*ZIG, "-shared", "-nostdlib++", "-o", str(out), *map(str, objects)]
    command += [str(mlx / "lib" / "libmlx.dylib"), str(libcxx_stub(mlx, build))]
    command += [f"-Wl,-install_name,@rpath/{out.name}", "-Wl,-undefined,dynamic_lookup", "-Wl,-s"]
    command += [f"-Wl,-rpath,{p}" for p in RPATHS]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the module does not link for macOS:\n{done.stderr}")
    return out


def modules(cache: Path, build: Path, jobs: int, pythons: list[str]) -> dict[str, Path]:
    """The extension module for each version of Python.

    Raises:
        RuntimeError: It does not compile or link, or a Python's headers are missing.
    """
    mlx = mlx_package(pinned_mlx(), cache)
    headers = {p: include_folder(p, cache) for p in pythons}
    objects = compile_all(mlx, build, jobs, headers)
    return {p: link(o, mlx, build / p, p) for p, o in objects.items()}


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    cache = Path(os.environ.get("VQKV_CACHE", ROOT / ".cache"))
    parser.add_argument("--cache", type=Path, default=cache, help="for what is downloaded")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "macos")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    return parser


def main() -> int:
    args = arguments(__doc__).parse_args()
    version = pinned_mlx()
    try:
        module = modules(args.cache, args.build, args.jobs, [PYTHON])[PYTHON]
    except RuntimeError as e:
        print(e, file=sys.stderr)
        return 1
    libmlx = mlx_package(version, args.cache) / "lib" / "libmlx.dylib"
    report = audit(module, libmlx, mlx_core(version, args.cache, PYTHON))
    print(
        f"{module.name}: {len(sources())} sources for arm64 macOS {TARGET[0]}.{TARGET[1]}, ", end=""
    )
    print(f"{report.mlx_symbols} symbols of MLX {version}, {len(report.faults)} faults")
    for fault in report.faults:
        print(f"  {fault}", file=sys.stderr)
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
