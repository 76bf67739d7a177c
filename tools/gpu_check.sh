#!/usr/bin/env bash
# Builds the extension with the CUDA executor for this machine's GPU and runs the tests on it.
# usage: tools/gpu_check.sh [build] [test] [sanitize]     (without arguments: build test)
#   PYTHON          the interpreter (python3), with mlx[cuda13] and what pyproject.toml names
#   ARCHITECTURES   for VQKV_CUDA_ARCHITECTURES; the GPU's own without
#   PYTEST_ARGS     in place of "-x -q --durations=10"
#   TEST_SECONDS    after which the tests are interrupted (480)
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
PATH=$("$python" -c 'import sys; print(sys.prefix)')/bin:$PATH
package=build/gpu/package/vqkv_ext
export PYTHONPATH=$PWD/$(dirname "$package")${PYTHONPATH:+:$PYTHONPATH} VQKV_DEVICE=gpu
read -ra pytest_args <<<"${PYTEST_ARGS:--x -q --durations=10}"
pytest=("$python" -m pytest -p no:cacheprovider)

build() {
  local own
  rm -rf "$package"
  mkdir -p "$(dirname "$package")"
  cp -r python/vqkv_ext "$package"
  rm -f "$package"/_ext*.so # of other builds in the tree
  own=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)-real
  cmake -S . -B build/gpu -G Ninja -DVQKV_CUDA=ON -DPython_EXECUTABLE="$(command -v "$python")" \
    -DVQKV_CUDA_ARCHITECTURES="${ARCHITECTURES:-$own}" \
    -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$PWD/$package"
  cmake --build build/gpu
  cp build/gpu/_build.py "$package"
  "$python" -c 'import vqkv_ext; print(vqkv_ext.info())'
}

# The simulator, the macOS build and file readers have nothing to do with the GPU.
run_tests() {
  local ignored=(--ignore tests/simulator)
  for name in macos_build gguf; do ignored+=(--ignore "tests/test_$name.py"); done
  timeout --signal=INT "${TEST_SECONDS:-480}" \
    "${pytest[@]}" "${pytest_args[@]}" "${ignored[@]}" -m "not model" tests
}

# A few tests that reach each kind of kernel; only the project's kernels are instrumented.
sanitize() {
  local filter=() tool
  local tests=(
    "attention.py::test_codes[product-d4-float16]" "attention.py::test_codes[centred-float32]"
    "vq.py::test_shared_codebook[4-float16]" "vq.py::test_wide_codes[float32-2-257]"
    "scalar.py::test_pack_and_unpack[5]" "scalar.py::test_quantize_and_dequantize[3-float16]"
    "qjl.py::test_encode" "qjl.py::test_inner_product[6-2-float16]"
    "hadamard.py::test_inverse_undoes_the_transform[80]"
    "hadamard_quantize.py::test_codes[3-float16]" "hadamard_quantize.py::test_block_centres"
    "trellis.py::test_same_bits_as_the_reference[2-33]" "trellis.py::test_widest_rows[1]"
  )
  if compute-sanitizer --help | grep -q -- --kernel-regex; then
    filter=(--kernel-regex kns=vqkv_)
  fi
  for tool in memcheck racecheck synccheck; do
    echo "--- $tool"
    compute-sanitizer --tool "$tool" "${filter[@]}" --error-exitcode 1 \
      "${pytest[@]}" -x -q "${tests[@]/#/tests/test_}"
  done
}

for stage in "${@:-build test}"; do
  for name in $stage; do
    echo "=== $name"
    case $name in
      build) build ;;
      test) run_tests ;;
      sanitize) sanitize ;;
      *) echo "unknown stage: $name" >&2; exit 2 ;;
    esac
  done
done
