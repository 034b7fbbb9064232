# Needs git, make and Python 3.11 or newer. `make demo` and `make test` install what they use into $(VENV).
#   another interpreter:   make test PYTHON=python3.12
#   another set of pins:   make test CONSTRAINTS=constraints-oldest.txt VENV=.venv/oldest
PYTHON ?= python3
VENV := .venv
CONSTRAINTS ?= constraints.txt

INSTALLED := $(VENV)/.installed
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest --durations=15

# Nothing here may depend on a model hub, or on being able to reach one.
export HF_HUB_OFFLINE := 1

# Accelerate would give a CPU job every core, which slows a small model on a large machine; the caller's value stands.
DEMO_THREADS = $(or $(OMP_NUM_THREADS),$(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count() or 1))'))
# With --cpu, accelerate ignores the user's own default configuration; the other flags are the answers that it lacks.
DEMO_LAUNCH := --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no

.DEFAULT_GOAL := help
.PHONY: help venv style check test test-slow test-gpu demo bench clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | awk -F ':.*## ' '{ printf "  make %-10s %s\n", $$1, $$2 }'

venv: $(INSTALLED)  ## create the virtual environment and install the package with its test tools

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or \
		sys.exit(f"trl-gad needs Python 3.11 or newer, $(PYTHON) is {v}; name another one: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --constraint $(CONSTRAINTS) --editable '.[test]'
	@touch $@

style: $(INSTALLED)  ## format the code and fix what the linter can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: $(INSTALLED)  ## linter, formatter and type checker; changes no file
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

test: check  ## everything that runs in minutes on a CPU: `check`, then the tests not marked slow or gpu
	$(PYTEST) -m 'not slow and not gpu'

test-slow: $(INSTALLED)  ## the tests marked slow
	$(PYTEST) -m 'slow and not gpu'

test-gpu: $(INSTALLED)  ## the tests marked gpu; needs a CUDA device
	$(PYTEST) -m gpu

demo: $(INSTALLED)  ## train a small Qwen3-VL on drawn pictures from start to end, on the CPU
	$(BIN)/accelerate launch $(DEMO_LAUNCH) --num_cpu_threads_per_process $(DEMO_THREADS) \
		recipes/gad_qwen3vl.py --config recipes/demo.yaml

bench: $(INSTALLED)  ## the update phase beside other ways to compute it; on a GPU: python -m tests.benchmarks.update_phase
	$(BIN)/python -m tests.benchmarks.update_phase --small --device cpu $(BENCH)

clean:  ## remove the virtual environment, caches and build files; what a run wrote stays
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find trl_gad recipes tests -type d -name __pycache__ -prune -exec rm -rf {} +
