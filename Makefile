# Two commands do everything on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

CHAOS ?= 20
# workers and test runs are many processes: each would parse all sources again where the environment forbids bytecode
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve test test-all chaos test-cluster lint bench bench-exactness models install clean

serve: install
	$(BIN)/paceline serve $(ARGS)

test: $(VENV)/test-installed
	{ $(BIN)/python -c "from paceline.cli.sources import BUILTIN; from paceline.engine.runner import ModelRunner; \
	ModelRunner.load(BUILTIN / 'coder-draft', max_batch_tokens=64, max_batch=1, num_blocks=8)" \
	&& $(BIN)/ruff check . && $(BIN)/mypy; } & engine=$$!; \
	$(BIN)/python -c "import paceline.simulator.fleet"; simulator=$$?; wait $$engine && exit $$simulator
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(ARGS)

test-all: $(VENV)/test-installed
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

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
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e .
	touch $@

$(VENV)/test-installed: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) --no-compile -e '.[test]'  # what is imported is compiled then: a tenth of it
	touch $(VENV)/installed $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
