# Two commands do everything on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

CHAOS ?= 20
# workers and test runs are many processes: each would parse all sources again where the environment forbids bytecode
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve test test-all chaos test-cluster lint bench bench-exactness models install compiled-engine compiled-simulator collected clean

serve: install
	$(BIN)/paceline serve $(ARGS)

# what is imported is compiled to bytecode then: a tenth of what is installed. Pip leaves one core to the compiler
test:
	$(MAKE) -j 3 BYTECODE=--no-compile compiled-simulator compiled-engine lint collected
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not cluster" $(ARGS)

compiled-engine: install
	$(BIN)/python -c "import paceline.engine.chain; \
	from paceline.cli.sources import BUILTIN; from paceline.engine.runner import ModelRunner; \
	ModelRunner.load(BUILTIN / 'coder-draft', max_batch_tokens=64, max_batch=1, num_blocks=8)"

compiled-simulator: $(VENV)/numba
	$(BIN)/python -c "import paceline.simulator.fleet"  # from this folder: it needs nothing but Numba

# two workers that collect at the same time would compile what they import twice
collected: $(VENV)/test-installed
	$(BIN)/python -m pytest --collect-only -qq > $(VENV)/collected || { cat $(VENV)/collected; exit 1; }

test-all: $(VENV)/test-installed
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist worksteal -m "not cluster" $(ARGS)

test-cluster: $(VENV)/test-installed
	$(PIP) -e '.[cluster]'
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m cluster $(ARGS)

lint: $(VENV)/test-installed
	$(BIN)/ruff check .
	$(BIN)/mypy

chaos: $(VENV)/test-installed
	OMP_WAIT_POLICY=passive PACELINE_CHAOS=$(CHAOS) $(BIN)/python -m pytest tests/chaos $(ARGS)

bench: $(VENV)/test-installed
	$(BIN)/python -m benchmarks $(ARGS)

bench-exactness: $(VENV)/test-installed
	$(BIN)/python -m benchmarks exactness

models: install
	$(BIN)/python scripts/train_builtin.py $(ARGS)

install: $(VENV)/installed

$(BIN)/python:
	$(PYTHON) -m venv --upgrade-deps $(VENV)  # a pip of 2023 looks at an index for as long as it installs

$(VENV)/numba: $(BIN)/python constraints.txt
	$(PIP) $(BYTECODE) numba
	touch $@

$(VENV)/installed: $(VENV)/numba pyproject.toml constraints.txt
	$(PIP) $(BYTECODE) -e .
	touch $@

$(VENV)/test-installed: $(VENV)/installed
	$(PIP) --no-compile -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
