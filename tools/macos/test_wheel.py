#!/usr/bin/env python3
"""Test the installed package on a Mac: on its GPU, or, where there is none, on the CPU with a
warning that is seen.

usage: test_wheel.py PROJECT_FOLDER
Exit code: that of the tests; 1 if the kernels are not those that were built.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx

import vqkv_ext

_TESTS = "build vq scalar hadamard hadamard_quantize qjl trellis attention attention_prefill"
_TESTS += " cache mlx_lm presets"


def warn(text: str) -> None:
    """On the console, and where GitHub runs this, on the page of the run."""
    print(f"WARNING: {text}", flush=True)
    if "GITHUB_ACTIONS" in os.environ:
        print(f"::warning title=no GPU::{text}", flush=True)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a") as out:
            out.write(f"**{text}**\n")


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    tests = Path(sys.argv[1]) / "tests"
    environment = dict(os.environ)
    if mx.metal.is_available():
        info = vqkv_ext.info()
        print(info, flush=True)
        if info["gpu_executor"] != "metal" or info["kernels"] not in ("metallib", "source"):
            print("the package has no Metal kernels", file=sys.stderr)
            return 1
        environment["VQKV_DEVICE"] = "gpu"
    else:
        warn("this machine has no GPU that Metal can use: no Metal kernel was run")
        environment["VQKV_DEVICE"] = "cpu"
    files = [f"test_{name}.py" for name in _TESTS.split()]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not model", *files],
        cwd=tests,
        env=environment,
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
