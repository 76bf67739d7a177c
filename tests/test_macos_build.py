"""The check of a macOS module (tools/macos) must find what would fail when a Mac imports it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytest.importorskip("lief")
pytest.importorskip("ziglang")
pytest.importorskip("nanobind")
sys.path.insert(0, str(ROOT / "tools" / "macos"))
import check_exports  # noqa: E402
import cross_build  # noqa: E402

SOURCE = """
#include "mlx/backend/gpu/copy.h"
#include "mlx/ops.h"
namespace vqkv { void left_out(); }
#define EXPORT extern "C" __attribute__((visibility("default"))) void*
#ifdef GOOD
EXPORT PyInit__ext() { return new auto(mlx::core::zeros({1})); }
#else
EXPORT PyInit__other() {
  auto a = mlx::core::zeros({1});
  mlx::core::copy_gpu(a, a, mlx::core::CopyType::Vector);
  vqkv::left_out();
  return nullptr;
}
#endif
"""


@pytest.fixture(scope="session")
def mlx() -> Path:
    cache = Path(os.environ.get("VQKV_CACHE", ROOT / ".cache"))
    package = cross_build.package_folder(cross_build.pinned_mlx(), cache)
    if not package.exists():
        pytest.skip("mlx's macOS wheels were not downloaded (make macos-check does)")
    return package


def module(mlx: Path, folder: Path, flags: list[str]) -> Path:
    source = folder / "module.cpp"
    source.write_text(SOURCE)
    flags = [*cross_build._FLAGS, *cross_build.includes(mlx), *flags]
    return cross_build.link([cross_build.compile_one(source, flags, folder)], mlx, folder)


@pytest.fixture(scope="session")
def good(mlx, tmp_path_factory) -> Path:
    """A sound module, without bindings."""
    return module(mlx, tmp_path_factory.mktemp("good"), ["-DGOOD"])


def test_a_sound_module_has_no_faults(mlx, good):
    report = check_exports.audit(good, mlx / "lib" / "libmlx.dylib")
    assert report.faults == [] and report.mlx_symbols > 0


def test_every_kind_of_fault_is_reported(mlx, tmp_path, monkeypatch):
    """copy_gpu is declared in MLX's headers, but libmlx.dylib does not export it."""
    core = next(mlx.glob("core.*.so"))
    monkeypatch.setattr(cross_build, "RPATHS", ["/opt/mlx/lib"])
    bad = module(mlx, tmp_path, [])
    monkeypatch.setattr(check_exports, "TARGET", (13, 0))
    monkeypatch.setattr(check_exports, "_LIBCXX", "/usr/lib/libother.dylib")
    faults = check_exports.audit(bad, mlx / "lib" / "libmlx.dylib", core).faults
    expected = (
        "libmlx.dylib does not export mlx::core::copy_gpu(",
        "nothing defines vqkv::left_out()",
        "the module does not export _PyInit__ext",
        "the deployment target must be (13, 0), but is (14, 0)",
        "the run paths must be ['@loader_path/../mlx/lib'], but are ['/opt/mlx/lib']",
        "the module must load /usr/lib/libother.dylib",
        "nanobind's key must be mlx.core's {'nanobind_",
    )
    assert len(faults) == len(expected), faults
    for fault, start in zip(faults, expected, strict=True):
        assert fault.startswith(start)


def test_a_module_without_signature_is_reported(mlx, good, tmp_path):
    binary = check_exports.parse(good)
    binary.remove_signature()
    binary.write(str(tmp_path / "unsigned.so"))
    report = check_exports.audit(tmp_path / "unsigned.so", mlx / "lib" / "libmlx.dylib")
    assert report.faults == ["the module has no signature, without which a Mac does not load it"]


def test_exceptions_are_those_of_the_system(mlx, good, tmp_path):
    """A libc++ inside the module would not catch what libmlx throws."""
    binary = check_exports.parse(good)
    assert {str(s.name) for s in binary.exported_symbols} >= {"_PyInit__ext"}
    assert not [s for s in binary.exported_symbols if str(s.name).startswith(("__Zn", "__Zd"))]
    stub = cross_build.libcxx_stub(mlx, tmp_path).read_text()
    assert all(name in stub for name in ("__ZTISt9exception", "___cxa_throw", "__Znwm"))


def test_the_cross_build_has_the_sources_of_the_cmake_build():
    """Of csrc, a Mac leaves out the simulator, x86 variants and the executor of other machines."""
    listed = {p.relative_to(ROOT / "csrc").as_posix() for p in cross_build.sources()}
    every = {p.relative_to(ROOT / "csrc").as_posix() for p in (ROOT / "csrc").rglob("*.cpp")}
    left_out = {p for p in every - listed if not p.startswith("simulator/")}
    of_others = {"backend/cuda.cpp", "backend/none.cpp"}
    assert left_out == of_others | {"cpu/variant_avx2.cpp", "cpu/variant_avx512.cpp"}
    assert len(listed) == len(cross_build.sources())
