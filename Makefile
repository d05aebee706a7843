# Every command sets up what it needs; `make setup` alone does just that.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: setup demo test test-slow check format clean help

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

setup: $(READY)  ## a virtual environment in .venv, pinned by constraints.txt

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps dflash==0.1.0
	touch $(READY)

demo: $(READY)  ## chats to a trained drafter on the built-in target, about ten minutes on two cores
	$(BIN)/headrace run examples/demo.yaml

test: $(READY)  ## the default suite: no GPU, no network
	$(BIN)/python -m pytest

test-slow: $(READY)  ## the slow suite, on the built-in target
	$(BIN)/python -m pytest -m slow

check: $(READY)  ## format, lint, types, docs
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_docs.py

format: $(READY)  ## rewrite to the house format
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/ruff check --fix src tests benchmarks

clean:  ## remove the environment, keep runs
	rm -rf $(VENV)
