"""Builds the simulator with given kernels as a shared library, and runs kernels in it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc" / "simulator"
SOURCES = [*sorted(p for p in CSRC.glob("*.cpp") if p.name != "kernels.cpp"), HERE / "c_api.cpp"]
KERNELS = [HERE / "good_kernels.metal", HERE / "bad_kernels.metal"]
FLAGS = ["-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-fsigned-char", "-pthread"]
FLAGS += ["-Wall", "-Wextra", "-Werror"]
ORDERS = (0, 1, 5, 6)


def compilers() -> list[list[str]]:
    """C++ compilers of this machine, as command prefixes."""
    found = [[path] for name in ("g++", "clang++") if (path := shutil.which(name))]
    try:
        import ziglang  # noqa: F401

        found.append([sys.executable, "-m", "ziglang", "c++"])
    except ImportError:
        pass
    return found


def run_compiler(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stderr}"


def build(
    compiler: Sequence[str],
    library: Path,
    *flags: str,
    kernels: Sequence[Path] = KERNELS,
    races: bool = False,
) -> Path:
    """Compiles the simulator and kernels, those of the tests by default, into a shared library.
    With `races` it sees the kernels' accesses to memory, and finds those that race."""
    command = [*compiler, "-O1", *FLAGS, *flags]
    sources = [*SOURCES, *kernels]
    objects: list[str] = []
    if races:
        sources = SOURCES
        for kernel in kernels:
            objects.append(f"{library}.{kernel.stem}.o")
            compile_only = ["-fsanitize=thread", "-c", "-x", "c++", str(kernel)]
            run_compiler(*(f for f in command if f != "-shared"), *compile_only, "-o", objects[-1])
    run_compiler(*command, *objects, "-x", "c++", *map(str, sources), "-o", str(library))
    return library


class SimulatorError(Exception):
    """The simulator's report."""


class Simulator:
    """A simulator library, loaded."""

    def __init__(self, library: Path | str) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.sim_kernels.restype = ctypes.c_char_p
        self._library.sim_executed.restype = ctypes.c_char_p

    def kernels(self) -> list[str]:
        return self._library.sim_kernels().decode().split()

    def executed(self) -> list[str]:
        return self._library.sim_executed().decode().split()

    def launch(
        self,
        kernel: str,
        buffers: Iterable[np.ndarray],
        params: bytes,
        grid: Sequence[int],
        threads: int,
        *,
        n_threads: int = 2,
        order: int = 0,
    ) -> None:
        """Runs a kernel once; arrays its non-const buffers stand for are changed in place."""
        arrays = list(buffers)
        n = len(arrays)
        data = (ctypes.c_void_p * n)(*(a.ctypes.data if a.size else None for a in arrays))
        sizes = (ctypes.c_size_t * n)(*(a.nbytes for a in arrays))
        shape = (ctypes.c_uint * 3)(*(tuple(grid) + (1, 1))[:3])
        error = ctypes.create_string_buffer(2048)
        failed = self._library.sim_launch(
            kernel.encode(),
            data,
            sizes,
            ctypes.c_size_t(n),
            params,
            ctypes.c_size_t(len(params)),
            shape,
            threads,
            n_threads,
            order,
            error,
            ctypes.c_size_t(len(error)),
        )
        if failed:
            raise SimulatorError(error.value.decode())

    def run(
        self,
        kernel: str,
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        params: bytes,
        grid: Sequence[int],
        threads: int,
    ) -> None:
        """Runs a kernel in several thread orders, which must agree to the bit."""
        first: list[bytes] | None = None
        for order in ORDERS:
            for a in outputs:
                a.reshape(-1).view(np.uint8)[...] = 0xFF
            self.launch(kernel, [*inputs, *outputs], params, grid, threads, order=order)
            got = [a.tobytes() for a in outputs]
            if first is None:
                first = got
            elif got != first:
                raise SimulatorError(f"kernel {kernel}: the result depends on the thread order")


def address_sanitizer(compiler: Sequence[str]) -> Path | None:
    """The shared runtime of a clang, to be preloaded; None if it has none."""
    name = f"libclang_rt.asan-{os.uname().machine}.so"
    r = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True)
    path = Path(r.stdout.strip())
    return path if r.returncode == 0 and path.is_file() else None
