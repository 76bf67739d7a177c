"""The simulator must report every planted fault."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from simulator_library import Simulator, SimulatorError, address_sanitizer, build, compilers

HERE = Path(__file__).resolve().parent
N = 64
ASAN_FLAGS = ["-g", "-fsanitize=address,undefined", "-fno-sanitize=vptr,function"]
ASAN_FLAGS += ["-fno-sanitize-recover=undefined", "-shared-libasan"]

REPORTS = {
    "bad_barrier": "divergence in threadgroup .*: thread 32 at threadgroup_barrier "
    r"bad_kernels.metal:\d+, thread 40 at the end of the kernel",
    "bad_simd": "divergence in .*: thread 0 at simd_sum .*, thread 16 at the end",
    "bad_site": "divergence in .* thread 0 at threadgroup_barrier .*, thread 32 at threadgroup_b",
    "bad_simd_site": "divergence in .* thread 0 at simd_sum .*, thread 16 at simd_sum",
    "bad_race": "depends on the thread order",
    "bad_weak_barrier": "depends on the thread order",
    "bad_write_after": r"out-of-bounds access to buffer 0 at byte 256 of 256, .* thread 63",
    "bad_write_before": "wrote past an end of buffer 0",
    "bad_read_after": "out-of-bounds access to buffer 0 at byte 256 of 256",
    "bad_const": "write to const buffer 0 at byte 0 of 256",
    "bad_threadgroup_size": "threadgroup memory of 32772 bytes exceeds 32768",
    "bad_threadgroup_write": "wrote past the end of threadgroup array values",
    "bad_stack": "stack overflow",
}
# reads of memory that nothing was written to: the poison reaches the output
POISONED = {"bad_read_before": 0, "bad_uninitialised": 5, "bad_threadgroup_read": 63}
ASAN_REPORTS = {
    "bad_write_after": "use-after-poison",
    "bad_write_before": "heap-buffer-overflow",
    "bad_read_after": "use-after-poison",
    "bad_read_before": "heap-buffer-overflow",
    "bad_threadgroup_write": "use-after-poison",
    "bad_threadgroup_read": "use-after-poison",
}


def run_bad(sim: Simulator, kernel: str) -> np.ndarray:
    reads = kernel in ("bad_read_after", "bad_read_before", "bad_const")
    inputs = [np.zeros(N, np.float32)] if reads else []
    out = np.zeros(N, np.float32)
    n = 40 if kernel == "bad_barrier" else N
    sim.run(kernel, inputs, [out], np.uint32(n).tobytes(), [2], N)
    return out


@pytest.mark.parametrize("kernel", REPORTS)
def test_fault_is_reported(sim: Simulator, kernel: str) -> None:
    with pytest.raises(SimulatorError) as e:
        run_bad(sim, kernel)
    assert re.search(REPORTS[kernel], str(e.value))
    assert f"kernel {kernel}: " in str(e.value)


@pytest.mark.parametrize("kernel", POISONED)
def test_poison_reaches_the_output(sim: Simulator, kernel: str) -> None:
    assert np.isnan(run_bad(sim, kernel)[POISONED[kernel]])


def test_every_bad_kernel_is_covered(sim: Simulator) -> None:
    assert {k for k in sim.kernels() if k.startswith("bad")} == {*REPORTS, *POISONED}


def test_works_after_a_fault(sim: Simulator) -> None:
    """Threads that a fault left in the middle of a kernel are started afresh."""
    x, out = np.ones(512, np.float32), np.zeros(2, np.float32)
    for kernel in ("bad_barrier", "bad_write_after", "bad_site", "bad_stack"):
        with pytest.raises(SimulatorError):
            run_bad(sim, kernel)
        params = np.uint32(512).tobytes() + np.float32(1).tobytes()
        sim.run("good_sum_float32_256", [x], [out], params, [2], 256)
        assert (out == 256).all()


def test_foreign_faults_reach_the_previous_handler(library: Path) -> None:
    """A fault that is not a kernel's ends the process as it would have without the simulator."""
    code = (
        "import sys, faulthandler, ctypes, numpy; from simulator_library import Simulator\n"
        "faulthandler.enable()\n"
        "s, o = Simulator(sys.argv[1]), numpy.zeros(64, numpy.float32)\n"
        "try: s.launch('bad_write_after', [o], numpy.uint32(64).tobytes(), [1], 64)\n"
        "except Exception as e: print(e, flush=True)\n"
        "ctypes.string_at(8)\n"
    )
    r = subprocess.run(
        [sys.executable, "-c", code, str(library)], capture_output=True, text=True, cwd=HERE
    )
    assert "out-of-bounds access" in r.stdout
    assert r.returncode == -11 and "Segmentation fault" in r.stderr


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A sanitized library and the runtime to preload."""
    for compiler in compilers():
        if runtime := address_sanitizer(compiler):
            library = tmp_path_factory.mktemp("sanitized") / "simulator.so"
            return build(compiler, library, *ASAN_FLAGS), runtime
    pytest.skip("no clang with the shared runtime of AddressSanitizer")


class TestAddressSanitizer:
    """With -fsanitize=address,undefined the good kernels are clean and each overrun is exact."""

    def python(self, sanitized: tuple[Path, Path], *args: str) -> subprocess.CompletedProcess[str]:
        library, runtime = sanitized
        # symbolize=0: the symbolizer may hang in a process that preloads the runtime
        options = "detect_leaks=0:symbolize=0:detect_stack_use_after_return=0"
        env = {
            **os.environ,
            "LD_PRELOAD": str(runtime),
            "ASAN_OPTIONS": options,
            "UBSAN_OPTIONS": "print_stacktrace=0",
            "VQKV_TEST_SIMULATOR": str(library),
        }
        command = [sys.executable, *args]
        return subprocess.run(command, capture_output=True, text=True, cwd=HERE, env=env)

    @pytest.mark.parametrize("kernel", ASAN_REPORTS)
    def test_overrun(self, sanitized: tuple[Path, Path], kernel: str) -> None:
        code = f"import sys, test_sim_faults as t; t.run_bad(t.Simulator(sys.argv[1]), '{kernel}')"
        r = self.python(sanitized, "-c", code, str(sanitized[0]))
        assert r.returncode != 0
        assert f"AddressSanitizer: {ASAN_REPORTS[kernel]}" in r.stderr, r.stderr[-2000:]

    @pytest.mark.parametrize("kernel", ["bad_barrier", "bad_site", "bad_race"])
    def test_other_faults(self, sanitized: tuple[Path, Path], kernel: str) -> None:
        code = f"import sys, test_sim_faults as t; t.run_bad(t.Simulator(sys.argv[1]), '{kernel}')"
        r = self.python(sanitized, "-c", code, str(sanitized[0]))
        assert re.search(REPORTS[kernel], r.stderr) and "Sanitizer" not in r.stderr

    def test_good_kernels_are_clean(self, sanitized: tuple[Path, Path]) -> None:
        r = self.python(
            sanitized,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--confcutdir=.",
            "test_sim_kernels.py",
        )
        assert r.returncode == 0, r.stdout[-4000:] + r.stderr[-4000:]
