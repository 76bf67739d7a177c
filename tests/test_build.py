"""What the build produces besides code: the amalgamated kernels, the stub, the version guard, and
the check of macOS exports."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

import vqkv_ext
from vqkv_ext import _ext

ROOT = Path(__file__).resolve().parents[1]


def load(path: Path):
    sys.path.insert(0, str(path.parent))
    try:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.pop(0)


def test_amalgamated_kernels_are_complete(tmp_path):
    text = load(ROOT / "cmake" / "amalgamate.py").amalgamate(ROOT / "metal")
    assert '#include "' not in text and "#pragma once" not in text
    assert "#include <metal_stdlib>" in text
    for path in (ROOT / "metal").glob("*.metal"):
        for name in re.findall(r"^#define (\w+)\(", path.read_text(), re.M):
            assert text.count(f"#define {name}(") == 1
    for struct in ("VqParams", "CodeParams", "AttentionParams"):
        assert text.count(f"struct {struct} {{") == 1
    assert text.count("{") == text.count("}")


def test_amalgamated_kernels_pass_the_type_check(tmp_path):
    pytest.importorskip("ziglang")
    text = load(ROOT / "cmake" / "amalgamate.py").amalgamate(ROOT / "metal")
    check = load(ROOT / "tools" / "check_address_spaces.py")
    source = tmp_path / "all.metal"
    command = [sys.executable, "-m", "ziglang", "c++", *check.FLAGS, *check.WARNINGS]
    for body, good in ((text, True), (text + "float bad(device float* p, uint i) {\n", False)):
        source.write_text(f'#include "{ROOT / "metal" / "compat" / "check.h"}"\n{body}')
        done = subprocess.run([*command, "-c", source], capture_output=True, cwd=tmp_path)
        assert (done.returncode == 0) == good, done.stderr.decode()


def test_every_kernel_runs_in_the_simulator(request):
    """Whatever is in the kernel list was launched by the tests of this session."""
    if not _ext.simulated():
        pytest.skip("the executor is not the simulator")
    if len(request.session.items) < 100:
        pytest.skip("not a whole run")
    import test_attention
    import test_vq

    assert test_vq and test_attention
    missing = set(_ext.simulator_kernels()) - set(_ext.simulator_executed())
    assert not missing
    assert 0 < len(_ext.simulator_kernels()) < 200
    print(len(_ext.simulator_kernels()), "kernel instantiations")


def test_stub_is_that_of_the_module(tmp_path):
    """The committed stub says what the native module has."""
    stubgen = pytest.importorskip("nanobind.stubgen")
    stub = stubgen.StubGen(_ext)
    stub.put(_ext)
    strip = lambda s: [x.strip() for x in s.splitlines() if x.strip() and not x.startswith("#")]  # noqa: E731
    committed = (ROOT / "python" / "vqkv_ext" / "_ext.pyi").read_text()
    assert strip(stub.get()) == strip(committed)


def test_version_guard_names_both_versions():
    """Case T32: another mlx than the one the extension was built for."""
    code = "import mlx.core as mx; mx.__version__ = '0.1.2'; import vqkv_ext"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    built = re.search(r"ImportError: .*built for mlx ([\d.]+), but mlx 0\.1\.2", done.stderr)
    assert done.returncode == 1 and built and built[1] == mx.__version__


def test_info():
    info = vqkv_ext.info()
    assert info["mlx"] == mx.__version__ and info["executor"] in ("cpu", "sim", "metal", "cuda")
    assert info["kernels"] in ("metallib", "source", "cuda", "none")
    assert info["cpu_isa"] in ("baseline", "avx2", "avx512")


def test_executor_sim_needs_a_development_build():
    """In builds without the simulator asking for it is an error, never a silent CPU run."""
    code = "import mlx.core as mx; from vqkv_ext import ops; import vqkv_ext\n"
    code += "print(vqkv_ext.info()['executor'])"
    env = os.environ | {"VQKV_EXECUTOR": "sim"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    if _ext.has_simulator():
        assert done.stdout.strip() == "sim"
    else:
        assert "needs a development build" in done.stderr


@pytest.mark.slow
def test_export_check_finds_what_libmlx_lacks(tmp_path):
    """copy_gpu is declared in MLX's headers, but libmlx.dylib does not export it."""
    pytest.importorskip("lief")
    pytest.importorskip("ziglang")
    build = load(ROOT / "tools" / "macos" / "cross_build.py")
    exports = sys.modules["exports"]
    mlx = Path(os.environ.get("VQKV_CACHE", ROOT / ".cache"))
    mlx = mlx / f"mlx-metal-{build.pinned_mlx()}" / "mlx"
    if not mlx.exists():
        pytest.skip("the macOS mlx wheel was not downloaded (make macos-check does)")
    source = tmp_path / "bad.cpp"
    source.write_text(
        '#include "mlx/backend/gpu/copy.h"\n#include "mlx/ops.h"\n'
        'extern "C" __attribute__((visibility("default"))) void* PyInit__ext() {\n'
        "  auto a = mlx::core::zeros({1});\n"
        "  mlx::core::copy_gpu(a, a, mlx::core::CopyType::Vector);\n  return nullptr;\n}\n"
    )
    obj = tmp_path / "bad.o"
    command = [*build.ZIG, "-std=c++20", f"-I{mlx / 'include'}", f"-I{build.HERE / 'shim'}"]
    subprocess.run([*command, "-c", str(source), "-o", str(obj)], check=True)
    module = build.link([obj], mlx, tmp_path)
    faults = exports.audit(module, mlx / "lib" / "libmlx.dylib").faults
    assert sum("does not export mlx::core::copy_gpu(" in f for f in faults) == 1
    assert not any("mlx::core::zeros" in f or "PyInit" in f for f in faults)
