#!/usr/bin/env bash
# Builds the extension so that the simulator sees what kernels access, and runs tests of each family
# in it: a race between threads of a kernel fails them (csrc/simulator/races.h). `tools/races.sh
# tests` runs those given instead.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(cd "${VENV:-.venv}/bin" && pwd)
tools/build_in.sh races -DVQKV_RACES=ON

export PYTHONPATH=$PWD/build/races/package VQKV_EXECUTOR=sim
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
