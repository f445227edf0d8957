# Every target sets up what it needs: a virtual environment in .venv with the package in editable mode.
#   make demo PYTHON=python3.12     another interpreter
#   make test PYTEST_ARGS="-k sort" a part of the suite

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
# Parallel test processes. Each one holds torch and transformers, so more than a few cost more than they gain.
JOBS ?= 2
# `make test CONSTRAINTS=` installs the newest releases instead of those that are pinned.
CONSTRAINTS ?= -c constraints.txt

BIN := $(VENV)/bin
READY := $(VENV)/.ready
UNFINISHED := $(VENV)/.unfinished

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu lint bench notebooks docs docs-serve clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(READY) ## generate text with a small trained MoE model, before and after tmoe
	@$(BIN)/tmoe demo

test: $(READY) ## run the test suite (without a GPU: kernels under Triton's interpreter)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

test-gpu: $(READY) ## run the tests that need a GPU
	@$(BIN)/python -m pytest -q -m gpu $(PYTEST_ARGS)

lint: $(READY) ## ruff on everything, mypy on tmoe/
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy

bench: $(READY) ## measure every operation at the shapes of real models (needs a GPU)
	@$(BIN)/python -m pytest bench --benchmark-quiet --benchmark-json=bench.json $(PYTEST_ARGS)
	@if command -v nvidia-smi >/dev/null; then $(BIN)/tmoe bench report bench.json; fi

notebooks: $(READY) ## run every notebook and write its outputs
	@$(BIN)/python -m tools.write_notebooks

docs: $(READY) ## build the documentation in build/site; fails on a link that leads nowhere
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: $(READY) ## show the documentation in a browser, and again after each change
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

setup: $(READY) ## only set up .venv

# An interrupted set-up leaves .unfinished behind, and the next one starts from nothing.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "tmoe needs Python 3.10 or newer; name one with: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up $(VENV) (a first run downloads PyTorch and takes some minutes)"
	@if [ -e $(UNFINISHED) ]; then rm -rf $(VENV); fi
	@mkdir -p $(VENV) && touch $(UNFINISHED)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || \
		{ echo "$(PYTHON) -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip install --disable-pip-version-check $(CONSTRAINTS) -e ".[test,lint]"
	@rm $(UNFINISHED) && touch $@

clean: ## remove .venv and everything that was built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .benchmarks tmoe-demo tmoe-bench
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
