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
    ("source", "options"),
    [
        (HERE / "good_kernels.metal", ["-arch=sm_90"]),
        # all kernels: with little optimisation, which takes most of the time
        (
            ROOT / "csrc" / "simulator" / "kernels.cpp",
            ["-arch=sm_90", "-Xcicc", "-O1", "-Xptxas", "-O0"],
        ),
        (ROOT / "metal" / "attention_prefill.metal", ["-arch=sm_90a"]),  # wgmma
    ],
    ids=["good_kernels", "kernels", "prefill"],
)
def test_nvcc_compiles(tmp_path: Path, source: Path, options: list[str]) -> None:
    command = ["nvcc", *options, "-std=c++17", "-c"]
    command += ["-o", str(tmp_path / "kernels.o"), "-x", "cu", str(source)]
    r = subprocess.run(command, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    assert "warning" not in r.stderr, r.stderr
