"""The kernels compile as CUDA, without a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize(
    "source",
    [HERE / "good_kernels.metal", ROOT / "csrc" / "simulator" / "kernels.cpp"],
    ids=lambda p: p.stem,
)
def test_nvcc_compiles(tmp_path: Path, source: Path) -> None:
    command = ["nvcc", "-arch=sm_90", "-std=c++17", "-c", "-o", str(tmp_path / "kernels.o")]
    command += ["-x", "cu", str(source)]
    r = subprocess.run(command, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    assert "warning" not in r.stderr, r.stderr
