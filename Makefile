# Everything works on a fresh clone with Python and make alone; `make help` lists the targets.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test lint format bench-overlap bench-orders bench-core bench-papers bench-validate clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-15s %s\n", $$1, $$2 }'
	@echo "  PYTHON=$(PYTHON) is used to make $(VENV); it must be built as a shared library"

setup: $(INSTALLED) ## make .venv and install all that the other targets need

$(INSTALLED): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) on PATH: install it, or run make PYTHON=/path/to/python"; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing dependencies into $(VENV) (1.5 GB the first time, 5.6 GB where torch is the one for CUDA)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[client,server,triton,dev]'
	@touch $@

demo: $(INSTALLED) ## start a real server, ask about images, check the answers, stop it
	@$(BIN)/epd demo

serve: $(INSTALLED) ## start the server on this machine's CPU and leave it running
	@$(BIN)/epd serve

test: $(INSTALLED) ## run all tests, those with a real server included
	@$(BIN)/python -m pytest

lint: $(INSTALLED) ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy

format: $(INSTALLED) ## let ruff rewrite the code
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format .

bench-core: $(INSTALLED) ## microseconds of a scheduling iteration
	@$(BIN)/python benchmarks/core.py

bench-papers: $(INSTALLED) ## the papers' experiments, simulated; writes the tables and plots of docs/results.md
	@for paper in rserve epd rps; do $(BIN)/python benchmarks/papers/$$paper.py || exit 1; done

bench-overlap: $(INSTALLED) ## time to first token with and without overlap of encoding and prefill
	@$(BIN)/python -m benchmarks.overlap

bench-orders: $(INSTALLED) ## the same load on this host under orders fcfs, edf and rps
	@$(BIN)/python -m benchmarks.orders

bench-validate: $(INSTALLED) ## the simulator against this host's server (20 minutes) and against emulated workers
	@$(BIN)/python -m benchmarks.validate --publish
	@$(BIN)/python -m benchmarks.validate --emulated --publish

clean: ## remove what make has made
	@rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
