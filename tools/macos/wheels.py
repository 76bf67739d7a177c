#!/usr/bin/env python3
"""Make the wheels for arm64 macOS on any machine, and audit them (wheel_audit.py).

They hold the cross-compiled module (cross_build.py) and the kernels as source, compiled by the Mac
at first use. Wheels that are built on a Mac hold a metallib instead.
Exit code: 0 if all wheels are made and sound, 1 if not.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import sys
import tempfile
import zipfile
from pathlib import Path

import scikit_build_core.build as backend
from cross_build import ROOT, arguments, modules, pinned_mlx
from wheel_audit import PLATFORM, PYTHONS, audit_wheel, show

sys.path.insert(0, str(ROOT / "cmake"))
from amalgamate import amalgamate  # noqa: E402

PACKAGE = ROOT / "python" / "vqkv_ext"
_BUILT = {".so", ".pyc"}
_TIME = (1980, 1, 1, 0, 0, 0)  # the same sources give the same wheel


def metadata() -> dict[str, bytes]:
    """Files of the .dist-info folder, as the build backend writes them on this machine."""
    cwd = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(ROOT)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                info = Path(folder) / backend.prepare_metadata_for_build_wheel(folder)
        finally:
            os.chdir(cwd)
        files = sorted(p for p in info.rglob("*") if p.is_file())
        return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


def package_files() -> dict[str, bytes]:
    """The package without what a build adds to it."""
    files = sorted(p for p in PACKAGE.rglob("*") if p.is_file() and p.suffix not in _BUILT)
    files = [p for p in files if p.name != "_build.py"]
    return {p.relative_to(PACKAGE.parent).as_posix(): p.read_bytes() for p in files}


def write(files: dict[str, bytes], info: str, path: Path) -> None:
    """A wheel of these files and their RECORD."""
    record = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(data)}")
    record.append(f"{info}/RECORD,,")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in (*files.items(), (f"{info}/RECORD", "\n".join(record).encode() + b"\n")):
            entry = zipfile.ZipInfo(name, _TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            out.writestr(entry, data)


def make(python: str, module: Path, folder: Path) -> Path:
    """The wheel for one version of Python."""
    described = metadata()
    info = next(iter(described)).split("/")[0]
    short = "cp" + python.replace(".", "")
    tag = f"{short}-{short}-{PLATFORM}"
    lines = described[f"{info}/WHEEL"].decode().splitlines()
    lines = [f"Tag: {tag}" if x.startswith("Tag:") else x for x in lines if x]
    described[f"{info}/WHEEL"] = ("\n".join(lines) + "\n").encode()
    facts = f'"""Facts of the build."""\n\nmlx_version = "{pinned_mlx()}"\n'
    files = package_files()
    files["vqkv_ext/_build.py"] = facts.encode()
    files[f"vqkv_ext/{module.name}"] = module.read_bytes()
    files["vqkv_ext/vqkv_ext.metal.txt"] = amalgamate(ROOT / "metal").encode()
    path = folder / f"{info.removesuffix('.dist-info')}-{tag}.whl"
    write(files | described, info, path)
    return path


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--python", nargs="+", default=list(PYTHONS), metavar="VERSION")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    try:
        built = modules(args.cache, args.build, args.jobs, args.python)
    except RuntimeError as e:
        print(e, file=sys.stderr)
        return 1
    wheels = [make(python, module, args.output) for python, module in built.items()]
    reports = [(wheel, audit_wheel(wheel, args.cache)) for wheel in wheels]
    return show(reports)


if __name__ == "__main__":
    sys.exit(main())
