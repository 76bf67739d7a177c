#!/usr/bin/env bash
# `tools/build_in.sh NAME FLAGS`: the extension with the simulator, built in build/NAME with these
# flags of CMake; the package to import is in build/NAME/package.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(cd "${VENV:-.venv}/bin" && pwd)
folder=build/$1
package=$folder/package/vqkv_ext
shift
rm -rf "$package"
mkdir -p "$(dirname "$package")"
cp -r python/vqkv_ext "$package"
rm -f "$package"/_ext*.so

"$bin/cmake" -S . -B "$folder" -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" -DVQKV_SIM=ON "$@" \
  -DPython_EXECUTABLE="$bin/python" -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$PWD/$package" >/dev/null
"$bin/cmake" --build "$folder"
cp "$folder/_build.py" "$package/"
