#!/usr/bin/env python3
"""Compile the extension's host code, Metal backend included, for arm64 macOS on any machine, link
it against the real libmlx.dylib, and check what it needs from there (exports.py).

The compiler is the clang in the ``ziglang`` package, with its macOS headers and the stubs in shim/.
Exit code: 0 if the module is sound, 1 if not.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from exports import audit

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
_NOT_FAMILIES = ("backend", "cpu", "simulator")
ZIG = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-macos.14.0"]


def pinned_mlx() -> str:
    """The mlx version that pyproject.toml pins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for requirement in project["project"]["dependencies"]:
        if found := re.match(r"mlx==([\d.]+)", requirement):
            return found[1]
    raise SystemExit("pyproject.toml pins no mlx version")


def mlx_metal(version: str, cache: Path) -> Path:
    """The unpacked mlx-metal wheel (headers, libmlx.dylib), downloaded once."""
    target = cache / f"mlx-metal-{version}"
    if not (target / "mlx" / "lib" / "libmlx.dylib").exists():
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(cache)]
        command += ["--only-binary=:all:", "--platform", "macosx_14_0_arm64"]
        subprocess.run([*command, "--python-version", "3.12", f"mlx-metal=={version}"], check=True)
        with zipfile.ZipFile(next(cache.glob(f"mlx_metal-{version}-*.whl"))) as wheel:
            wheel.extractall(target)
    return target / "mlx"


def sources() -> list[Path]:
    """Host sources of a macOS build: those of CMakeLists.txt, with the Metal backend."""
    families = [p for p in (ROOT / "csrc").glob("**/*.cpp") if p.parent.name not in _NOT_FAMILIES]
    extra = ["backend/metal.cpp", "backend/sim.cpp", "cpu/dispatch.cpp", "cpu/variant_baseline.cpp"]
    return sorted(families) + [ROOT / "csrc" / name for name in extra]


def compile_all(mlx: Path, build: Path) -> list[Path]:
    """Objects of all sources and of nanobind."""
    import nanobind

    nb = Path(nanobind.__file__).parent
    include = [
        ROOT / "csrc",
        mlx / "include",
        mlx / "include" / "metal_cpp",
        nb / "include",
        Path(sysconfig.get_path("include")),
    ]
    flags = ["-std=c++20", "-O2", "-fPIC", "-fblocks", "-fvisibility=hidden", "-D_METAL_"]
    flags += ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror"]
    flags += [f'-DVQKV_MLX_VERSION="{pinned_mlx()}"', "-DNB_DOMAIN=mlx"]
    flags += [f"-I{include[0]}"] + [
        x for p in [HERE / "shim", *include[1:]] for x in ("-isystem", p)
    ]
    nb_flags = [*flags, "-w", "-DNDEBUG", f"-isystem{nb / 'ext' / 'robin_map' / 'include'}"]
    build.mkdir(parents=True, exist_ok=True)

    def one(job: tuple[Path, list]) -> Path:
        source, options = job
        name = str(
            source.relative_to(ROOT if source.is_relative_to(ROOT / "csrc") else source.parent)
        )
        out = build / (name.replace("/", "_") + ".o")
        done = subprocess.run(
            [*ZIG, *map(str, options), "-c", str(source), "-o", str(out)],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{name} does not compile for macOS:\n{done.stderr}")
        return out

    jobs = [(s, flags) for s in sources()] + [(nb / "src" / "nb_combined.cpp", nb_flags)]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(one, jobs))


def link(objects: list[Path], mlx: Path, build: Path) -> Path:
    """The module, with Python's and the system's symbols left to the loader."""
    out = build / f"_ext.cpython-{sys.version_info.major}{sys.version_info.minor}-darwin.so"
    command = [*ZIG, "-shared", "-o", out, *objects, mlx / "lib" / "libmlx.dylib"]
    command += ["-Wl,-undefined,dynamic_lookup", "-Wl,-rpath,@loader_path/../mlx/lib"]
    subprocess.run(list(map(str, command)), check=True)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(os.environ.get("VQKV_CACHE", ROOT / ".cache"))
    parser.add_argument("--cache", type=Path, default=default, help="for the mlx-metal wheel")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "macos")
    args = parser.parse_args()
    mlx = mlx_metal(pinned_mlx(), args.cache)
    try:
        module = link(compile_all(mlx, args.build), mlx, args.build)
    except RuntimeError as e:
        print(e, file=sys.stderr)
        return 1
    result = audit(module, mlx / "lib" / "libmlx.dylib")
    print(f"{module.name}: arm64 macOS, {result.mlx_symbols} symbols of MLX {pinned_mlx()}")
    for fault in result.faults:
        print(f"  {fault}", file=sys.stderr)
    print("faults:", len(result.faults))
    return 1 if result.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
