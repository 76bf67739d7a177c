"""What the build produces besides code: the amalgamated kernels, the stub and the guards against
another mlx."""

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

SYSTEM_HEADERS = ("metal_simdgroup", "metal_simdgroup_matrix", "metal_stdlib")
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


def kernel_names(source: Path, headers: Path) -> list[str]:
    """Names of the kernels that a Metal source instantiates, as the preprocessor leaves them."""
    command = [sys.executable, "-m", "ziglang", "c++", "-E", "-P", "-x", "c++"]
    command += ["-D__METAL_VERSION__=310", "-isystem", str(headers), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.findall(r'host_name\(((?:\s*"[^"]*")+)\s*\)', done.stdout)
    return ["".join(re.findall(r'"([^"]*)"', name)) for name in found]


@pytest.fixture
def amalgam(tmp_path) -> Path:
    """The one-file kernel source, as a build without a Metal compiler writes it."""
    out = tmp_path / "vqkv_ext.metal.txt"
    script = ROOT / "cmake" / "amalgamate.py"
    subprocess.run([sys.executable, script, ROOT / "metal", out], check=True)
    return out


def test_amalgam_is_one_self_contained_file(amalgam):
    text = amalgam.read_text()
    assert '#include "' not in text and "#pragma once" not in text and "compat/" not in text
    assert sorted(set(re.findall(r"#include <(\w+)>", text))) == sorted(SYSTEM_HEADERS)
    structs = re.findall(r"^struct (\w+) \{", (ROOT / "metal" / "params.h").read_text(), re.M)
    assert structs and all(text.count(f"struct {name} {{") == 1 for name in structs)
    assert text.count("{") == text.count("}")
    assert len(re.findall(r"^#if", text, re.M)) == text.count("#endif")


def test_amalgam_has_every_kernel(amalgam, tmp_path):
    pytest.importorskip("ziglang")
    headers = tmp_path / "headers"
    headers.mkdir()
    for name in SYSTEM_HEADERS:
        (headers / name).touch()
    names = kernel_names(amalgam, headers)
    sources = sorted((ROOT / "metal").glob("*.metal"))
    assert len(sources) >= 2 and all(kernel_names(s, headers) for s in sources)
    assert sorted(names) == sorted(n for s in sources for n in kernel_names(s, headers))
    assert len(set(names)) == len(names)
    if _ext.has_simulator():  # which has kernels for products of quads besides (QUAD_MATRICES)
        others = set(_ext.simulator_kernels()) - set(names)
        assert len(names) + len(others) == len(_ext.simulator_kernels())
        assert all("_quads_" in name for name in others)


def test_amalgam_passes_the_address_space_check(amalgam, tmp_path):
    pytest.importorskip("ziglang")
    check = load(ROOT / "tools" / "check_address_spaces.py")
    compiler = check.find_compiler()
    source = tmp_path / "all.cpp"
    mapping = f'#include "{ROOT / "metal" / "compat" / "check.h"}"\n'
    source.write_text(mapping + amalgam.read_text())
    assert check.check(source, compiler) == []
    source.write_text(source.read_text() + "float bad(device float* p) { float* q = p; }\n")
    assert check.check(source, compiler)


def test_pins_agree():
    """One search finds every pinned version, and each package has one."""
    texts = {p: p.read_text() for p in (ROOT / "pyproject.toml", ROOT / "README.md")}
    workflows = sorted((ROOT / ".github").rglob("*.yml"))
    texts |= {p: p.read_text() for p in workflows}
    versions: dict[str, set[str]] = {}
    for text in texts.values():
        for name, version in re.findall(r"([a-z][\w.-]*)(?:\[\w]+\])?==([\w.]+)", text):
            versions.setdefault(name, set()).add(version)
    assert {"mlx", "nanobind", "lief"} <= versions.keys()
    assert {name: v for name, v in versions.items() if len(v) > 1} == {}
    for path in (ROOT / "pyproject.toml", *workflows):
        for line in texts[path].splitlines():
            if re.search(r"==\d|uses: \S+@|<0\.\d", line):
                assert "# PIN:" in line, f"{path.name}: {line}"


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


def test_nanobind_of_another_mlx_is_refused_at_configure_time(tmp_path):
    """It would import, and then reject every mx.array."""
    pytest.importorskip("cmake")
    nanobind = pytest.importorskip("nanobind")
    script = (ROOT / "cmake" / "mlx_nanobind_key.py").read_text()
    key = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout
    header = (Path(nanobind.source_dir()) / "nb_internals.h").read_text()
    internals = re.search(r"define NB_INTERNALS_VERSION (\d+)", header)[1]
    assert key.strip().endswith(f"_v{internals}")

    for name in ("CMakeLists.txt", "csrc", "metal"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "cmake").mkdir()
    (tmp_path / "cmake" / "mlx_nanobind_key.py").write_text("print('other_v1')")
    command = [sys.executable, "-m", "cmake", "-S", tmp_path, "-B", tmp_path / "build"]
    command += [f"-DPython_EXECUTABLE={sys.executable}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    message = " ".join(done.stderr.split())
    assert "internals 'other_v1'" in message and f"provides v{internals}" in message


def test_info(monkeypatch):
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "7")
    info = vqkv_ext.info()
    assert "MLX_MAX_OPS_PER_BUFFER=7" in info["environment"] and info["hardware"]
    assert info["mlx"] == mx.__version__ and info["executor"] in ("cpu", "sim", "metal", "cuda")
    assert info["kernels"] in ("metallib", "source", "fatbin", "none")
    assert info["cpu_isa"] in ("baseline", "avx2", "avx512")


def test_executor_sim_needs_a_development_build():
    """In builds without the simulator asking for it is an error, never a silent CPU run."""
    code = "import mlx.core as mx; mx.set_default_device(mx.cpu); import vqkv_ext\n"
    code += "print(vqkv_ext.info()['executor'])"
    env = os.environ | {"VQKV_EXECUTOR": "sim"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    if _ext.has_simulator():
        assert done.stdout.strip() == "sim"
    else:
        assert "needs a development build" in done.stderr
