# `make demo` and `make test` set up all they need: the environment, the packages, the model.
# What is already there is left alone.

PYTHON ?= $(shell for p in python3.11 python3; do $$p -c '' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
# Test processes; each runs its model on one thread and holds up to 3 GB.
WORKERS ?= 2
INSTALLED := $(VENV)/.installed

.PHONY: help install model demo test test-all lint format bench

help:
	@echo "make demo     three agents over one report, text edges against latent edges"
	@echo "make test     lint, types and the tests that take minutes together"
	@echo "make test-all the same with every example, benchmark and long run: what CI runs"
	@echo "make lint     ruff and mypy"
	@echo "make format   rewrite the sources in the project's format"
	@echo "make bench    the hand-over benchmark"

# The stamp is newer than what it was made from, so a second run installs nothing.
$(INSTALLED): pyproject.toml constraints.txt
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing the packages (once) ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[demo,notebook,dev]'
	@touch $@

install: $(INSTALLED)

# Takes milliseconds once the model is there.
model: $(INSTALLED)
	@$(BIN)/python -m langgraph_latent.demo.model

demo: model
	@$(BIN)/langgraph-latent demo

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: lint model
	$(PYTEST) -m "not slow"

test-all: lint model
	$(PYTEST)

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: model
	$(BIN)/python -m benchmarks.handoff
