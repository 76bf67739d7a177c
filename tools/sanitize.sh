#!/usr/bin/env bash
# Builds the extension with AddressSanitizer and UBSan (clang) and runs the tests of native code on
# it, on the CPU kernels and, for the subset marked sim, in the simulator.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(cd "${VENV:-.venv}/bin" && pwd)
tools/build_in.sh asan -DCMAKE_CXX_COMPILER=clang++ -DVQKV_SANITIZE=ON -DVQKV_WERROR=ON

runtime=$(clang++ -print-file-name="libclang_rt.asan-$(uname -m).so")
if [ ! -e "$runtime" ]; then
  echo "clang++ has no AddressSanitizer runtime (libclang-rt-N-dev)" >&2
  exit 1
fi
export PYTHONPATH=$PWD/build/asan/package PYTHONMALLOC=malloc
# Python itself leaks by design; symbolizing inside it deadlocks.
export ASAN_OPTIONS=detect_leaks=0:symbolize=0:allocator_may_return_null=1
export UBSAN_OPTIONS=print_stacktrace=0:halt_on_error=1
# Tests that reach native code, of each family and of the caches. In the simulator, where guard pages
# watch the buffers anyway, some files.
tests=()
for name in vq scalar hadamard hadamard_quantize qjl trellis attention attention_matrix \
  attention_prefill attention_trellis attention_axes attention_transforms gradient cache \
  cache_append mlx_lm; do
  tests+=("tests/test_$name.py")
done
simulated=()
for name in vq scalar hadamard attention attention_prefill; do
  simulated+=("tests/test_$name.py")
done
pytest=("$bin/python" -m pytest -p no:cacheprovider -q)
LD_PRELOAD=$runtime "${pytest[@]}" -m "not slow and not model" "${tests[@]}"
VQKV_EXECUTOR=sim LD_PRELOAD=$runtime "${pytest[@]}" -m sim "${simulated[@]}"
