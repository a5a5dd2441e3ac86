# Two commands: `make demo` trains the quickstart, `make test` checks everything. Both set themselves up first.
PYTHON ?= python3
VENV ?= .venv
# On a machine whose pip index serves CUDA builds of torch, name an index with the CPU wheels here, or leave empty.
TORCH_INDEX ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test lint types contracts unit clean

install: $(STAMP)

# Made again whenever the dependencies change.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 ..."; exit 6; }
	$(PYTHON) -m venv $(VENV) || { echo "No virtual environment could be made; on Debian: apt-get install python3-venv"; exit 6; }
	$(BIN)/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 'torch==2.13.*'
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

demo: install
	$(BIN)/switchyard run quickstart

test: lint types contracts unit

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

contracts: install
	$(BIN)/lint-imports

unit: install
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
