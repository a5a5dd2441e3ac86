# Two commands: `make demo` trains the quickstart, `make test` checks everything. Both set themselves up first.
PYTHON ?= python3
VENV ?= .venv
# On a machine whose pip index serves CUDA builds of torch, name an index with the CPU wheels here, or leave empty.
TORCH_INDEX ?=

# torch_npu changes what `import torch` does, so what needs it lives in an environment of its own.
ASCEND_VENV ?= .venv-ascend

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ASCEND_STAMP := $(ASCEND_VENV)/.installed

# Triton, for the tests of our kernels: beside the environment, since a CPU build of torch in it must not find triton.
KERNELS := .kernels
TRITON := triton==3.9.0

.PHONY: gpu kernels install demo test test-ascend record-ascend lint types contracts unit clean

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

unit: install $(KERNELS)/.installed
	$(BIN)/python -m pytest

$(KERNELS)/.installed: Makefile $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(KERNELS) '$(TRITON)'
	@touch $@

# Writes the table of registers and shared memory again; read the difference before committing it.
kernels: install $(KERNELS)/.installed
	TRITON_DEFAULT_FP_FUSION=1 PYTHONPATH=$(KERNELS) $(BIN)/python -m backends.ops.kernels tests/backends/kernels.json

# On a machine with an NVIDIA GPU and a CUDA build of torch; elsewhere it stops with status 3.
gpu: install
	$(BIN)/python -m tests.backends.on_gpu

# Ascend without Ascend: the real torch_npu over a pretend CANN; see tests/ascend/sim/README.md. Needs g++, nm, readelf.
test-ascend: $(ASCEND_STAMP)
	$(ASCEND_VENV)/bin/python -m tests.ascend.sim.run -m pytest tests/ascend

# Writes tests/ascend/calls.json again, after a change of the calls in backends/npu_ops.py or of tests/ascend/cases.py.
record-ascend: $(ASCEND_STAMP)
	$(ASCEND_VENV)/bin/python -m tests.ascend.sim.run -m tests.ascend.record

$(ASCEND_STAMP): pyproject.toml
	$(PYTHON) -m venv $(ASCEND_VENV)
	$(ASCEND_VENV)/bin/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 'torch==2.13.*'
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(ASCEND_VENV)/bin/pip install --quiet --editable '.[dev,ascend]'
	@touch $@

clean:
	rm -rf $(VENV) $(ASCEND_VENV) $(KERNELS) *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
