# `make demo` and `make test` set up everything they need in .venv; see README.md.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEPENDENCIES := $(VENV)/.dependencies
INSTALLED := $(VENV)/.installed
RELEASE := $(VENV)/.release
DOCS := build/docs
SOURCES := $(shell find pyproject.toml CMakeLists.txt cmake csrc metal python -type f \
  -not -name '*.so' -not -name '*.pyc' -not -name _build.py)
PYTHON_FILES := python tests benchmarks tools cmake
CXX_FILES = $(shell git ls-files 'csrc/*.h' 'csrc/*.cpp' 'metal/*' 'tests/*.cpp' 'tools/*.h')

.PHONY: demo test install deps dev lint format macos-check macos-wheel linux-wheel sdist \
  check-dist docs asan races clean

demo: install
	$(BIN)/python benchmarks/demo.py $(ARGS)

# VQKV_EXECUTOR=sim make test runs the Metal kernels in the simulator instead of the CPU kernels.
test: install
	$(BIN)/python -m pytest $(ARGS)

# An ordinary install, with the simulator, again whenever a source changed.
install: $(INSTALLED)
$(INSTALLED): $(DEPENDENCIES) $(SOURCES)
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation --force-reinstall \
	  --config-settings=cmake.define.VQKV_SIM=ON --config-settings=build-dir=build/install .
	touch $@

deps: $(DEPENDENCIES)
$(DEPENDENCIES): pyproject.toml tools/requirements.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "needs Python 3.11 or newer: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python tools/requirements.py lm plot dev > $(VENV)/requirements.txt
	$(BIN)/python -m pip install -q -r $(VENV)/requirements.txt
	touch $@

# In-tree development build; use it with PYTHONPATH=python.
dev: $(DEPENDENCIES)
	$(BIN)/cmake -S . -B build/dev -G Ninja -DVQKV_SIM=ON \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DPython_EXECUTABLE=$(abspath $(BIN))/python \
	  -DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$(CURDIR)/python/vqkv_ext
	$(BIN)/cmake --build build/dev
	cp build/dev/_build.py python/vqkv_ext/_build.py

lint: $(DEPENDENCIES)
	$(BIN)/ruff check $(PYTHON_FILES)
	$(BIN)/ruff format --check $(PYTHON_FILES)
	@$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: $(DEPENDENCIES)
	$(BIN)/ruff check --fix $(PYTHON_FILES)
	$(BIN)/ruff format $(PYTHON_FILES)
	@$(BIN)/clang-format -i $(CXX_FILES)

# Host code for arm64 macOS, against the real libmlx.dylib, from any machine.
macos-check: $(DEPENDENCIES)
	$(BIN)/python tools/macos/cross_build.py

# Wheels of a Mac for all versions of Python, and their audit, from any machine.
macos-wheel: $(DEPENDENCIES)
	$(BIN)/python tools/macos/wheels.py $(ARGS)

# A wheel for this machine's Python. libmlx.so stays that of the mlx package.
linux-wheel: $(RELEASE)
	rm -rf build/wheel
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w build/wheel \
	  --config-settings=build-dir=build/wheel-build .
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --exclude libmlx.so -w dist \
	  build/wheel/*.whl

sdist: $(RELEASE)
	$(BIN)/python -m build -q --sdist --no-isolation -o dist .

check-dist: $(RELEASE)
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

$(RELEASE): $(DEPENDENCIES)
	$(BIN)/python tools/requirements.py release > $(VENV)/release.txt
	$(BIN)/python -m pip install -q -r $(VENV)/release.txt
	touch $@

# The site, in build/site; warnings are errors. The native module need not be built for it.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet

$(DOCS)/.installed: pyproject.toml tools/requirements.py
	$(PYTHON) -m venv $(DOCS)
	$(PYTHON) tools/requirements.py --only docs > $(DOCS)/requirements.txt
	$(DOCS)/bin/python -m pip install -q -r $(DOCS)/requirements.txt
	touch $@

asan: $(DEPENDENCIES)
	VENV=$(VENV) bash tools/sanitize.sh

races: $(DEPENDENCIES)
	VENV=$(VENV) bash tools/races.sh

clean:
	rm -rf build $(VENV) demo_output
