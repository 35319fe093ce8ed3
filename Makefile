PYTHON ?= python3
BIN := .venv/bin

.PHONY: test test-slow demo bench lint clean

test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not slow"

test-slow: .venv/installed-examples
	$(BIN)/pytest -m slow

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: .venv/installed
	$(BIN)/rfsoftmax demo

bench: .venv/installed
	$(BIN)/python benchmarks/bench_loss.py

# One environment serves every command; it is made again when what it installs changes.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed, got " + sys.version)'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[lab,dev]"
	touch $@

# Some 200 MB that only the slow tests need.
.venv/installed-examples: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[examples]"
	touch $@

clean:
	rm -rf .venv build .mypy_cache .pytest_cache .ruff_cache
