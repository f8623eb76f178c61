VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# torch first and pinned: plain pip then finds the right build, and nothing later replaces it.
TORCH ?= torch==2.13.0

.PHONY: help quickstart test chaos lint clean

help:
	@echo "make quickstart   set up and train a tiny model through the whole pipeline (about 3 minutes)"
	@echo "make test         set up and run the tests"
	@echo "make chaos        kill every process of some runs, over and over, and check that nothing is lost"
	@echo "make lint         ruff and mypy"
	@echo "make clean        remove the virtual environment and all runs"

$(BIN)/.quickstart: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check $(TORCH)
	$(BIN)/pip install -q --disable-pip-version-check -e '.[quickstart]'
	@touch $@

$(BIN)/.dev: $(BIN)/.quickstart
	$(BIN)/pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@

quickstart: $(BIN)/.quickstart
	$(BIN)/penstock run configs/quickstart.yaml

test: $(BIN)/.dev
	$(BIN)/pytest $(PYTEST_ARGS)

chaos: $(BIN)/.dev
	$(BIN)/pytest -m "chaos or not chaos" -s --timeout 900 tests/chaos $(PYTEST_ARGS)

lint: $(BIN)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs
