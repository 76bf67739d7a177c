#!/usr/bin/env python3
"""Check wheels for arm64 macOS, on any machine, before a Mac installs them.

Name and tag, RECORD, contents, metadata, kernels, and the module against the pinned mlx
(check_exports.py): symbols, deployment target, run paths, entry point, nanobind's key, signature.
Exit code: 0 if all wheels are sound, 1 if not.
"""

from __future__ import annotations

import base64
import csv
import email
import hashlib
import re
import struct
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from check_exports import TARGET, audit
from cross_build import ROOT, arguments, mlx_core, mlx_package, pinned_mlx
from rich.console import Console

PLATFORM = f"macosx_{TARGET[0]}_{TARGET[1]}_arm64"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")  # PIN: those of mlx's wheels
METALLIB, SOURCE = "vqkv_ext/vqkv_ext.metallib", "vqkv_ext/vqkv_ext.metal.txt"
_NAME = re.compile(r"vqkv_ext-([\w.]+)-cp3(\d+)-cp3\2-(\w+)\.whl")
_IN_REPOSITORY = {".md", ".npy", ".py", ".pyi", ".txt", ".typed"}


@dataclass
class WheelReport:
    """Findings about one wheel.

    Attributes:
        contents: File names and sizes in bytes.
        mlx_symbols: Symbols the module needs of libmlx.dylib.
        faults: What is wrong with it.
    """

    contents: dict[str, int] = field(default_factory=dict)
    mlx_symbols: int = 0
    faults: list[str] = field(default_factory=list)


def _record(files: dict[str, bytes], info: str) -> list[str]:
    """Faults of RECORD: every file, with its hash and size, and no other."""
    rows = {r[0]: r[1:] for r in csv.reader(files[f"{info}/RECORD"].decode().splitlines())}
    faults = [f"RECORD lists {n}, which is not there" for n in rows.keys() - files.keys()]
    for name, data in files.items():
        if name == f"{info}/RECORD":
            continue
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        if rows.get(name) != [f"sha256={digest}", str(len(data))]:
            faults.append(f"RECORD does not have {name} as it is")
    return faults


def _metadata(files: dict[str, bytes], info: str, tag: str, version: str) -> list[str]:
    faults = []
    about = email.message_from_bytes(files[f"{info}/METADATA"])
    wheel = email.message_from_bytes(files[f"{info}/WHEEL"])
    if wheel.get_all("Tag") != [tag]:
        faults.append(f"WHEEL must have the tag {tag}, but has {wheel.get_all('Tag')}")
    if wheel["Root-Is-Purelib"] != "false":
        faults.append("WHEEL must say Root-Is-Purelib: false")
    if about["Version"] != version:
        faults.append(f"METADATA must be of version {version}, but is of {about['Version']}")
    needed = [r for r in about.get_all("Requires-Dist") or [] if "Darwin" in r]
    if not any(r.startswith(f"mlx=={pinned_mlx()};") for r in needed):
        faults.append(f"METADATA must require mlx=={pinned_mlx()} on Darwin, but requires {needed}")
    return faults


def _contents(files: dict[str, bytes], info: str, python: str) -> list[str]:
    """Faults of what is in the wheel: the package as in the repository, one module, kernels."""
    module = f"vqkv_ext/_ext.cpython-{python.replace('.', '')}-darwin.so"
    package = ROOT / "python"
    ours = {
        p.relative_to(package).as_posix(): p
        for p in (package / "vqkv_ext").rglob("*")
        if p.suffix in _IN_REPOSITORY and p.name != "_build.py"
    }
    built = {module, "vqkv_ext/_build.py"}
    kernels = [n for n in (METALLIB, SOURCE) if n in files]
    names = {n for n in files if not n.startswith(f"{info}/")}
    faults = [f"{n} is missing" for n in sorted((ours.keys() | built) - names)]
    faults += [f"{n} does not belong there" for n in sorted(names - ours.keys() - built)
               if n not in kernels]  # fmt: skip
    faults += [
        f"{n} is not that of the repository"
        for n, p in sorted(ours.items())
        if n in files and files[n] != p.read_bytes()
    ]
    for name in ("licenses/LICENSE", "entry_points.txt"):
        if f"{info}/{name}" not in files:
            faults.append(f"{info}/{name} is missing")
    if len(kernels) != 1:
        faults.append(f"the wheel must have either {METALLIB} or {SOURCE}, but has {kernels}")
    if f'"{pinned_mlx()}"' not in files.get("vqkv_ext/_build.py", b"").decode():
        faults.append(f"_build.py must name mlx {pinned_mlx()}")
    return faults


def _kernels(files: dict[str, bytes]) -> list[str]:
    if METALLIB in files:
        magic, target = files[METALLIB][:4], struct.unpack("<HH", files[METALLIB][12:16])
        if magic != b"MTLB":
            return [f"{METALLIB} is no Metal library"]
        if target > TARGET:
            return [f"{METALLIB} must be for macOS {TARGET} or older, but is for {target}"]
    elif SOURCE in files:
        sys.path.insert(0, str(ROOT / "cmake"))
        from amalgamate import amalgamate

        if files[SOURCE].decode() != amalgamate(ROOT / "metal"):
            return [f"{SOURCE} is not that of metal/"]
    return []


def audit_wheel(path: Path, cache: Path, *, metallib: bool = False) -> WheelReport:
    """All checks of one wheel; ``cache`` keeps mlx's macOS wheels, ``metallib`` insists on compiled
    kernels."""
    report = WheelReport()
    named = _NAME.fullmatch(path.name)
    if named is None:
        report.faults.append("the name must be vqkv_ext-VERSION-cpXY-cpXY-PLATFORM.whl")
        return report
    version, minor, platform = named.groups()
    python = f"3.{minor}"
    if python not in PYTHONS:
        report.faults.append(f"Python must be one of {', '.join(PYTHONS)}, but is {python}")
        return report
    if platform != PLATFORM:
        report.faults.append(f"the platform must be {PLATFORM}, but is {platform}")
    with zipfile.ZipFile(path) as wheel:
        files = {n: wheel.read(n) for n in wheel.namelist() if not n.endswith("/")}
    report.contents = {n: len(data) for n, data in sorted(files.items())}
    info = f"vqkv_ext-{version}.dist-info"
    if missing := [n for n in ("METADATA", "WHEEL", "RECORD") if f"{info}/{n}" not in files]:
        report.faults += [f"{info}/{n} is missing" for n in missing]
        return report
    report.faults += _record(files, info)
    report.faults += _metadata(files, info, f"cp3{minor}-cp3{minor}-{PLATFORM}", version)
    report.faults += _contents(files, info, python)
    report.faults += _kernels(files)
    if metallib and METALLIB not in files:
        report.faults.append(f"{METALLIB} is missing: the build found no Metal toolchain")
    libmlx = mlx_package(pinned_mlx(), cache) / "lib" / "libmlx.dylib"
    for name in (n for n in files if n.endswith((".so", ".dylib"))):
        with tempfile.TemporaryDirectory() as folder:
            module = Path(folder) / Path(name).name
            module.write_bytes(files[name])
            found = audit(module, libmlx, mlx_core(pinned_mlx(), cache, python))
        report.mlx_symbols = found.mlx_symbols
        report.faults += [f"{name}: {fault}" for fault in found.faults]
    return report


def show(reports: list[tuple[Path, WheelReport]], *, listing: bool = False) -> int:
    """Print reports; returns the exit code."""
    console = Console(soft_wrap=True, highlight=False)
    for path, r in reports:
        kernels = "metallib" if METALLIB in r.contents else "kernel sources"
        console.print(
            f"{path.name}: {path.stat().st_size:,} bytes, {len(r.contents)} files, {kernels}, "
            f"{r.mlx_symbols} symbols of mlx {pinned_mlx()}, {len(r.faults)} faults"
        )
        for name, size in r.contents.items() if listing else ():
            console.print(f"  {size:>9,}  {name}")
        for fault in r.faults:
            console.print(f"  {fault}", style="red", markup=False)
    return 1 if any(r.faults for _, r in reports) else 0


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--metallib", action="store_true", help="kernels must be compiled")
    parser.add_argument("--list", action="store_true", help="print what each holds")
    args = parser.parse_args()
    reports = [(w, audit_wheel(w, args.cache, metallib=args.metallib)) for w in args.wheels]
    return show(reports, listing=args.list)


if __name__ == "__main__":
    sys.exit(main())
