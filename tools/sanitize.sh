#!/usr/bin/env bash
# Builds the extension with AddressSanitizer and UBSan (clang) and runs the native tests on it, on
# the CPU kernels and, for the subset marked sim, in the simulator.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(cd "${VENV:-.venv}" && pwd)
python=$venv/bin/python
out=build/asan/package
mkdir -p "$out"
rm -rf "$out/vqkv_ext"
cp -r python/vqkv_ext "$out/vqkv_ext"
rm -f "$out"/vqkv_ext/_ext*.so

PATH="$venv/bin:$PATH"
export PATH
cmake -S . -B build/asan -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_COMPILER=clang++ \
  -DVQKV_SIM=ON -DVQKV_SANITIZE=ON -DVQKV_WERROR=ON -DPython_EXECUTABLE="$python" \
  -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$PWD/$out/vqkv_ext" >/dev/null
cmake --build build/asan
cp build/asan/_build.py "$out/vqkv_ext/"

runtime=$(clang++ -print-file-name=libclang_rt.asan-x86_64.so)
case $(uname -m) in aarch64) runtime=$(clang++ -print-file-name=libclang_rt.asan-aarch64.so) ;; esac
export PYTHONPATH=$PWD/$out PYTHONMALLOC=malloc
# Python itself leaks by design; symbolizing inside it deadlocks.
export ASAN_OPTIONS=detect_leaks=0:symbolize=0:allocator_may_return_null=1
export UBSAN_OPTIONS=print_stacktrace=0:halt_on_error=1
tests="tests/test_vq.py tests/test_attention.py tests/test_gradient.py tests/test_cache.py"
LD_PRELOAD=$runtime "$python" -m pytest -q -p no:cacheprovider $tests
VQKV_EXECUTOR=sim LD_PRELOAD=$runtime "$python" -m pytest -q -p no:cacheprovider -m sim $tests
