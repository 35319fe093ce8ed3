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

# Hours, and some 20 GB of memory at n = 10^7. How close the samplers come is measured on data: make bench DATA=directory.
bench: .venv/installed
	$(BIN)/python benchmarks/bench_start.py
	$(BIN)/python benchmarks/bench_loss.py
	$(BIN)/python benchmarks/bench_step.py
	$(BIN)/python benchmarks/bench_step.py --profile
	$(BIN)/python benchmarks/bench_memory.py
	$(BIN)/python benchmarks/bench_memory.py --dtype bfloat16 --num-classes 1000000 10000000 --largest-baseline 0 \
		--output results/bench_memory_bfloat16.csv
	$(BIN)/python benchmarks/bench_update.py
	$(BIN)/python benchmarks/bench_sharded.py
	$(BIN)/python benchmarks/bench_ranks.py
	$(BIN)/python benchmarks/bench_quality.py cost
	$(if $(DATA),$(BIN)/python benchmarks/bench_quality.py quality --data $(DATA) --draws 200)
	$(if $(DATA),$(BIN)/python benchmarks/bench_noise.py --data $(DATA))
	$(if $(DATA),$(BIN)/python benchmarks/bench_follow.py --data $(DATA))
	$(if $(DATA),$(BIN)/python benchmarks/bench_modes.py --data $(DATA))

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
