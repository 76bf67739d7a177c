# `make demo` and `make test` set up everything they need in .venv; see README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := $(shell git ls-files --cached --others --exclude-standard pyproject.toml CMakeLists.txt cmake csrc metal python 2>/dev/null)

.PHONY: demo test dev lint format macos-check asan clean

# An ordinary install, with the simulator, again whenever a source changed.
$(STAMP): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q --config-settings=cmake.define.VQKV_SIM=ON ".[lm,plot,dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python benchmarks/demo.py $(ARGS)

# VQKV_EXECUTOR=sim make test runs the Metal kernels in the simulator instead of the CPU kernels.
test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

# In-tree development build; use it with PYTHONPATH=python.
dev:
	cmake -S . -B build/dev -G Ninja -DVQKV_SIM=ON -DPython_EXECUTABLE=$$(command -v $(PYTHON)) \
	  -DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$(CURDIR)/python/vqkv_ext
	cmake --build build/dev
	cp build/dev/_build.py python/vqkv_ext/_build.py

lint: $(STAMP)
	$(BIN)/ruff check python tests benchmarks tools cmake
	$(BIN)/ruff format --check python tests benchmarks tools cmake
	git ls-files 'csrc/*.h' 'csrc/*.cpp' 'metal/*' | xargs $(BIN)/clang-format --dry-run --Werror

format: $(STAMP)
	$(BIN)/ruff check --fix python tests benchmarks tools cmake
	$(BIN)/ruff format python tests benchmarks tools cmake
	git ls-files 'csrc/*.h' 'csrc/*.cpp' 'metal/*' | xargs $(BIN)/clang-format -i

# Host code for arm64 macOS, against the real libmlx.dylib, from any machine.
macos-check: $(STAMP)
	$(BIN)/python tools/macos/cross_build.py

asan: $(STAMP)
	VENV=$(abspath $(VENV)) bash tools/sanitize.sh

clean:
	rm -rf build $(VENV) demo_output
