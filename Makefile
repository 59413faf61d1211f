# Needs make and Python 3.11 or newer; everything else goes into .venv, with the versions of constraints.txt.
PYTHON ?= python3
EXTRAS ?= dev
ARGS ?=
BIN := .venv/bin
# Nearly all that a run does is compile: programs that did not change since the last run are kept.
KEPT := JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.venv/compiled JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0

.DEFAULT_GOAL := help
.PHONY: help set-up parity test test-slow lint docs catalogue-page format generated pictures pin clean

help:  ## this list
	@echo 'Each target first installs what it needs, once.'
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F '|' '{ printf "  make %-14s %s\n", $$1, $$2 }'
	@echo 'Settings: PYTHON=python3.12 (another interpreter), EXTRAS=dev,cuda (JAX on an NVIDIA GPU), ARGS="..."'

set-up:  ## make or renew .venv; nothing to do when it is up to date
	@command -v $(PYTHON) >/dev/null || { echo 'set-up: no program named $(PYTHON); name a Python 3.11 or newer by PYTHON=...' >&2; exit 1; }
	@$(PYTHON) scripts/set_up.py '$(EXTRAS)'

parity: set-up  ## compare the two wings: `parity check`, more options by ARGS="--full"
	@$(KEPT) $(BIN)/parity check $(ARGS)

test: set-up  ## the tests that take seconds
	$(BIN)/python -m pytest -n 2 -m 'not slow' $(ARGS)

test-slow: set-up  ## all tests
	$(BIN)/python -m pytest -n 2 $(ARGS)

lint: set-up  ## ruff and mypy, as CI runs them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: set-up  ## build the documentation into docs/_build
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build

catalogue-page: set-up  ## write docs/catalogue.md from benchmarks/results
	$(BIN)/python -m benchmarks.publish

format: set-up  ## put the code into the house format and repair what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generated: set-up  ## write what is made from the code: the JSON schema, and the page of codes
	$(BIN)/python scripts/generated.py

pictures: set-up  ## draw docs/pictures: the pages of a pair that differs and of one that agrees
	$(BIN)/python scripts/pictures.py

pin: set-up  ## write constraints.txt from what .venv holds
	$(BIN)/python scripts/pin.py > constraints.new && mv constraints.new constraints.txt

clean:  ## remove .venv, caches and builds
	rm -rf .venv build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
