# `make demo`, `make test` and `make drills` each set everything up on a fresh machine first.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := $(wildcard src/unwall/native/cpp/*)
SANITIZER_TESTS ?= tests/native tests/tiers
WORKERS ?= 2
FUZZ ?= ranks resume elastic moves planned trained
FIRST ?= 0
COUNT ?= 25

.PHONY: demo test drills clocks fuzz check docs native sanitize bench-native clean system

demo: .venv/ready
	$(BIN)/unwall demo --out build/demo

test: check
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not drill and not clock"

# The long tests: minutes, at most half an hour.
drills: .venv/ready
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "drill and not clock"

# Tests with a clock in their assertions, for a machine that does nothing else.
clocks: .venv/ready
	$(BIN)/python -m pytest -m clock

# Random cases, none of them part of the tests: COUNT seeds of each kind in FUZZ (tests/fuzz), from FIRST on. A few minutes.
fuzz: .venv/ready
	@for kind in $(FUZZ); do \
	  PYTHONPATH=tests:tests/support $(BIN)/python -m fuzz.$$kind --first $(FIRST) --count $(COUNT) || failed=1; \
	done; test -z "$$failed"

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(SOURCES)

.venv/ready: pyproject.toml constraints.txt CMakeLists.txt $(SOURCES)
	$(MAKE) system
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

# The documentation as a site, in build/site.
docs: .venv/ready
	$(BIN)/mkdocs build --strict --quiet

# liburing gives the io_uring backend. Where it cannot be installed the thread backend does the work.
system:
	@test -e /usr/include/liburing.h || ! command -v apt-get > /dev/null || test "$$(id -u)" != 0 || \
	  { apt-get update -qq && apt-get install -y -qq liburing-dev; } > /dev/null 2>&1 || \
	  echo "liburing-dev could not be installed: building without io_uring"

# The native library into the source tree, with cmake and a compiler alone: then PYTHONPATH=src is a working unwall.
native:
	cmake -S . -B build/native -DCMAKE_BUILD_TYPE=Release > /dev/null
	cmake --build build/native --parallel
	cmake --install build/native --prefix src > /dev/null

sanitize: .venv/ready
	./tools/sanitize address $(SANITIZER_TESTS)
	./tools/sanitize thread $(SANITIZER_TESTS)

bench-native: .venv/ready
	$(BIN)/python bench/native.py

clean:
	rm -rf build .venv src/unwall/native/*.so
