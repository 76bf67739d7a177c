#!/usr/bin/env bash
# Builds the extension so that the simulator sees what kernels access, and runs tests of each family
# in it: a race between threads of a kernel fails them (csrc/simulator/races.h). `tools/races.sh
# tests` runs those given instead.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(cd "${VENV:-.venv}/bin" && pwd)
package=build/races/package/vqkv_ext
rm -rf "$package"
mkdir -p "$(dirname "$package")"
cp -r python/vqkv_ext "$package"
rm -f "$package"/_ext*.so

"$bin/cmake" -S . -B build/races -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" \
  -DVQKV_SIM=ON -DVQKV_RACES=ON -DPython_EXECUTABLE="$bin/python" \
  -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$PWD/$package" >/dev/null
"$bin/cmake" --build build/races
cp build/races/_build.py "$package/"

export PYTHONPATH=$PWD/$(dirname "$package") VQKV_EXECUTOR=sim
run() { "$bin/python" -m pytest -p no:cacheprovider -q -m sim "$@"; }
if [ $# -gt 0 ]; then
  run "$@"
  exit
fi
# A process runs one threadgroup at a time: two of them, of about the same length.
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
run tests/test_{vq,hadamard,hadamard_quantize,qjl,scalar,trellis}.py &
run tests/test_attention{,_matrix,_prefill,_transforms,_trellis}.py
wait $!
