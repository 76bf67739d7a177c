"""The kernels compile as CUDA, without a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
METAL = HERE.parents[1] / "metal"
# With little optimisation, which takes most of the time, but for what has wgmma.
QUICK = ["-arch=sm_90", "-Xcicc", "-O1", "-Xptxas", "-O0"]
SOURCES = {
    HERE / "good_kernels.metal": ["-arch=sm_90"],
    **dict.fromkeys(sorted(METAL.glob("*.metal")), QUICK),
    METAL / "attention_prefill.metal": ["-arch=sm_90a"],
}

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, subprocess.CompletedProcess]:
    """What nvcc said of each source."""
    folder = tmp_path_factory.mktemp("cuda")

    def compile_one(source: Path) -> subprocess.CompletedProcess:
        command = ["nvcc", *SOURCES[source], "-std=c++17", "-c"]
        command += ["-o", str(folder / f"{source.stem}.o"), "-x", "cu", str(source)]
        return subprocess.run(command, capture_output=True, text=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(SOURCES, pool.map(compile_one, SOURCES), strict=True))


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_nvcc_compiles(compiled: dict[Path, subprocess.CompletedProcess], source: Path) -> None:
    done = compiled[source]
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
