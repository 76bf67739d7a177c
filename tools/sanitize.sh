#!/usr/bin/env bash
# Builds the extension with AddressSanitizer and UBSan (clang) and runs the tests of native code on
# it, on the CPU kernels and, for the subset marked sim, in the simulator.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(cd "${VENV:-.venv}/bin" && pwd)
package=build/asan/package/vqkv_ext
rm -rf "$package"
mkdir -p "$(dirname "$package")"
cp -r python/vqkv_ext "$package"
rm -f "$package"/_ext*.so

"$bin/cmake" -S . -B build/asan -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" \
  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_COMPILER=clang++ \
  -DVQKV_SIM=ON -DVQKV_SANITIZE=ON -DVQKV_WERROR=ON -DPython_EXECUTABLE="$bin/python" \
  -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$PWD/$package" >/dev/null
"$bin/cmake" --build build/asan
cp build/asan/_build.py "$package/"

runtime=$(clang++ -print-file-name="libclang_rt.asan-$(uname -m).so")
if [ ! -e "$runtime" ]; then
  echo "clang++ has no AddressSanitizer runtime (libclang-rt-N-dev)" >&2
  exit 1
fi
export PYTHONPATH=$PWD/$(dirname "$package") PYTHONMALLOC=malloc
# Python itself leaks by design; symbolizing inside it deadlocks.
export ASAN_OPTIONS=detect_leaks=0:symbolize=0:allocator_may_return_null=1
export UBSAN_OPTIONS=print_stacktrace=0:halt_on_error=1
# The simulator's own tests plant faults; the others start compilers or run little native code.
tests=(tests -p no:cacheprovider -q -m "not slow and not model" --ignore tests/simulator)
for name in build macos_build evaluation gguf statistics demo benchmark_kernels cli lloyd_max prefill_presets; do tests+=(--ignore "tests/test_$name.py"); done
LD_PRELOAD=$runtime "$bin/python" -m pytest "${tests[@]}"
VQKV_EXECUTOR=sim LD_PRELOAD=$runtime "$bin/python" -m pytest "${tests[@]}" -m sim
