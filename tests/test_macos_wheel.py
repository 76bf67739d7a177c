"""The audit of macOS wheels must find what would fail on a Mac, and nothing in a sound wheel."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

import test_macos_build as build
from test_macos_build import good, mlx  # noqa: F401  (fixtures)

pytest.importorskip("scikit_build_core")
import wheel_audit  # noqa: E402  (test_macos_build adds its folder)
import wheels  # noqa: E402

CACHE = Path(os.environ.get("VQKV_CACHE", build.ROOT / ".cache"))
PYTHON = build.cross_build.PYTHON
INFO = "vqkv_ext-0.1.0.dist-info"
SOUND_BUT_FOR_NANOBIND = "nanobind's key must be mlx.core's"
"""The module of these tests has no bindings."""


@pytest.fixture(scope="module")
def wheel(good, tmp_path_factory) -> Path:  # noqa: F811
    return wheels.make(PYTHON, good, tmp_path_factory.mktemp("wheel"))


def faults(path: Path, **more: bool) -> list[str]:
    found = wheel_audit.audit_wheel(path, CACHE, **more).faults
    return [f for f in found if SOUND_BUT_FOR_NANOBIND not in f]


def changed(wheel: Path, folder: Path, change) -> Path:
    """A wheel with other files, and a RECORD of them."""
    with zipfile.ZipFile(wheel) as z:
        files = {n: z.read(n) for n in z.namelist() if n != f"{INFO}/RECORD"}
    change(files)
    path = folder / wheel.name
    wheels.write(files, INFO, path)
    return path


def test_a_sound_wheel_has_no_faults(wheel):
    report = wheel_audit.audit_wheel(wheel, CACHE)
    assert faults(wheel) == [] and report.mlx_symbols > 0
    assert any(SOUND_BUT_FOR_NANOBIND in f for f in report.faults)
    assert "vqkv_ext/vqkv_ext.metal.txt" in report.contents
    assert faults(wheel, metallib=True) == [
        "vqkv_ext/vqkv_ext.metallib is missing: the build found no Metal toolchain"
    ]


def test_the_same_sources_give_the_same_wheel(wheel, good, tmp_path):  # noqa: F811
    again = wheels.make(PYTHON, good, tmp_path)
    assert again.name == wheel.name and again.read_bytes() == wheel.read_bytes()


def _edit(name: str, old: bytes, new: bytes):
    def change(files: dict[str, bytes]) -> None:
        assert old in files[name]
        files[name] = files[name].replace(old, new)

    return change


METALLIB = b"MTLB\x01\x80\x02\x00\x07\x00\x00\x81\x0f\x00\x00\x00"  # for macOS 15
CHANGES = {
    "bundled": (
        lambda f: f.update({"vqkv_ext/libmlx.txt": b""}),
        "vqkv_ext/libmlx.txt does not belong there",
    ),
    "left out": (lambda f: f.pop("vqkv_ext/ops/vq.py"), "vqkv_ext/ops/vq.py is missing"),
    "old": (
        _edit("vqkv_ext/ops/vq.py", b"nearest", b"farthest"),
        "vqkv_ext/ops/vq.py is not that of the repository",
    ),
    "tag": (
        _edit(f"{INFO}/WHEEL", b"macosx_14_0", b"macosx_13_0"),
        "WHEEL must have the tag",
    ),
    "mlx": (
        _edit(f"{INFO}/METADATA", b"Requires-Dist: mlx==0", b"Requires-Dist: mlx==9"),
        "METADATA must require mlx==",
    ),
    "kernels": (
        _edit("vqkv_ext/vqkv_ext.metal.txt", b"kernel", b"kernle"),
        "vqkv_ext/vqkv_ext.metal.txt is not that of metal/",
    ),
    "no kernels": (
        lambda f: f.pop("vqkv_ext/vqkv_ext.metal.txt"),
        "the wheel must have either",
    ),
    "both": (
        lambda f: f.update({"vqkv_ext/vqkv_ext.metallib": METALLIB}),
        "the wheel must have either",
    ),
    "new metallib": (
        lambda f: (
            f.pop("vqkv_ext/vqkv_ext.metal.txt"),
            f.update({"vqkv_ext/vqkv_ext.metallib": METALLIB}),
        ),
        "vqkv_ext/vqkv_ext.metallib must be for macOS (14, 0) or older, but is for (15, 0)",
    ),
    "no entry point": (
        lambda f: f.pop(f"{INFO}/entry_points.txt"),
        f"{INFO}/entry_points.txt is missing",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_contents_is_found(name, wheel, tmp_path):
    change, message = CHANGES[name]
    found = faults(changed(wheel, tmp_path, change))
    assert found and found[0].startswith(message), found


def test_names_and_records(wheel, tmp_path):
    other = tmp_path / wheel.name.replace("macosx_14_0", "macosx_11_0")
    other.write_bytes(wheel.read_bytes())
    assert faults(other) == ["the platform must be macosx_14_0_arm64, but is macosx_11_0_arm64"]
    other = tmp_path / wheel.name.replace(PYTHON.replace(".", ""), "310")
    other.write_bytes(wheel.read_bytes())
    assert faults(other) == ["Python must be one of 3.11, 3.12, 3.13, 3.14, but is 3.10"]
    other = tmp_path / wheel.name
    other.write_bytes(wheel.read_bytes())
    with zipfile.ZipFile(other, "a") as z:
        z.writestr("vqkv_ext/libmlx.dylib.txt", "")
    assert faults(other)[0] == "RECORD does not have vqkv_ext/libmlx.dylib.txt as it is"


def test_each_version_of_python_has_its_own_headers(tmp_path):
    """Those of this interpreter, with the pyconfig.h of a Mac."""
    folder = build.cross_build.include_folder(PYTHON, tmp_path)
    text = (folder / "pyconfig.h").read_text()
    assert (folder / "Python.h").is_file() and "arm64 macOS" in text
    major, minor = PYTHON.split(".")
    version = (folder / "patchlevel.h").read_text()
    assert f"#define PY_MINOR_VERSION        {minor}" in version and major == "3"
