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
import sysconfig
import tempfile
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nanobind
from check_exports import RPATHS, TARGET, audit

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


def mlx_package(version: str, cache: Path) -> Path:
    """The mlx package of a Mac (headers, libmlx.dylib, mlx.core), downloaded once."""
    package = package_folder(version, cache)
    target = package.parent
    if not target.exists():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
            command += ["--only-binary=:all:", "--platform", "macosx_14_0_arm64"]
            command += ["--python-version", PYTHON, f"mlx=={version}", f"mlx-metal=={version}"]
            subprocess.run(command, check=True)
            part = target.with_name(f"{target.name}.part{os.getpid()}")
            for wheel in Path(folder).glob("*.whl"):
                zipfile.ZipFile(wheel).extractall(part)
            part.rename(target)
    return package


def sources() -> list[Path]:
    """Host sources of a macOS build, as CMakeLists.txt lists them."""
    families = [p for p in (ROOT / "csrc").glob("**/*.cpp") if p.parent.name not in _NOT_FAMILIES]
    return sorted(families) + [ROOT / "csrc" / name for name in _OF_A_MAC]


def includes(mlx: Path) -> list[str]:
    """Flags for headers that are not the project's own."""
    nanobind_headers = Path(nanobind.include_dir())
    folders = [HERE / "shim", mlx / "include", mlx / "include" / "metal_cpp", nanobind_headers]
    folders += [nanobind_headers.parent / "ext" / "robin_map" / "include"]
    folders += [Path(sysconfig.get_path("include"))]
    return [x for folder in folders for x in ("-isystem", str(folder))]


def compile_one(source: Path, flags: list[str], build: Path) -> Path:
    """The object of one source; a RuntimeError with the compiler's messages if there is none."""
    name = source.relative_to(ROOT) if source.is_relative_to(ROOT) else Path(source.name)
    out = build / ("_".join(name.parts) + ".o")
    done = subprocess.run([*ZIG, *flags, "-c", source, "-o", out], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} does not compile for macOS:\n{done.stderr}")
    return out


def compile_all(mlx: Path, build: Path, jobs: int) -> list[Path]:
    """Objects of all sources and of nanobind."""
    build.mkdir(parents=True, exist_ok=True)
    flags = ["-std=c++20", "-O2", "-fPIC", "-fblocks", "-fvisibility=hidden", "-D_METAL_"]
    flags += ["-DNB_DOMAIN=mlx", f"-I{ROOT / 'csrc'}", *includes(mlx)]
    own = [*flags, f'-DVQKV_MLX_VERSION="{pinned_mlx()}"']
    own += ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror"]
    nanobind_source = Path(nanobind.source_dir()) / "nb_combined.cpp"
    with ThreadPoolExecutor(jobs) as pool:
        objects = [pool.submit(compile_one, nanobind_source, [*flags, "-w", "-DNDEBUG"], build)]
        objects += [pool.submit(compile_one, s, own, build) for s in sources()]
        return [o.result() for o in objects]


def link(objects: list[Path], mlx: Path, build: Path) -> Path:
    """The module, with the interpreter's symbols left to the loader."""
    out = build / f"_ext.cpython-{PYTHON.replace('.', '')}-darwin.so"
    command = [*ZIG, "-shared", "-o", str(out), *map(str, objects)]
    command += [str(mlx / "lib" / "libmlx.dylib")]
    command += ["-Wl,-undefined,dynamic_lookup", *(f"-Wl,-rpath,{p}" for p in RPATHS)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the module does not link for macOS:\n{done.stderr}")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    cache = Path(os.environ.get("VQKV_CACHE", ROOT / ".cache"))
    parser.add_argument("--cache", type=Path, default=cache, help="for mlx's macOS wheels")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "macos")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    version = pinned_mlx()
    mlx = mlx_package(version, args.cache)
    try:
        module = link(compile_all(mlx, args.build, args.jobs), mlx, args.build)
    except RuntimeError as e:
        print(e, file=sys.stderr)
        return 1
    report = audit(module, mlx / "lib" / "libmlx.dylib", next(mlx.glob("core.*.so")))
    print(
        f"{module.name}: {len(sources())} sources for arm64 macOS {TARGET[0]}.{TARGET[1]}, ", end=""
    )
    print(f"{report.mlx_symbols} symbols of MLX {version}, {len(report.faults)} faults")
    for fault in report.faults:
        print(f"  {fault}", file=sys.stderr)
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
