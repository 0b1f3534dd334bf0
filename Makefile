# memwall: `make demo` trains a small GPT, `make test` runs everything that CI runs. Both need Python >= 3.11 only.

PYTHON ?= python3
# What pip installs as torch, options included: TORCH=torch==2.12.0, TORCH="torch --index-url ...".
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
# Test files at a time; most of them start two ranks.
WORKERS ?= 2
DEMO_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check

# One stamp for each set of packages and each TORCH: a second run installs nothing, another TORCH does.
TORCH_ID := $(shell printf '%s' '$(TORCH)' | cksum | cut -d ' ' -f 1)
BASE := $(VENV)/.base-$(TORCH_ID)
TEST := $(VENV)/.test-$(TORCH_ID)
LINT := $(VENV)/.lint

.DEFAULT_GOAL := help
.PHONY: help demo test lint clean python
.DELETE_ON_ERROR:

help:  ## This list
	@sed -n 's/^\([a-z]*\):.*## /make \1	/p' $(MAKEFILE_LIST) | expand -t 14
	@echo
	@echo 'PYTHON=$(PYTHON)  TORCH=$(TORCH)  WORKERS=$(WORKERS)  PYTEST_ARGS="tests/core -k lane"  DEMO_ARGS="trainer.max_steps=20"'

demo: $(BASE)  ## Install into .venv, train experiment=gpt_nano on two local processes, print where the run folder is
	$(BIN)/memwall-train experiment=gpt_nano $(DEMO_ARGS)

test: $(TEST)  ## Install into .venv and run the tests; PYTEST_ARGS chooses some
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: $(LINT)  ## Check the code's style
	$(BIN)/ruff check .

clean:  ## Remove .venv, build products and caches; run folders stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: there is no $(PYTHON). Install Python 3.11 or newer, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: memwall needs Python >= 3.11 and $(PYTHON) is $$($(PYTHON) -V 2>&1). Name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: $(PYTHON) cannot make environments. Install its venv module (Debian and Ubuntu: python3-venv)" >&2; exit 1; }

$(BIN)/python: | python
	$(PYTHON) -m venv $(VENV)

# torch first, so that the pinned build is there when the project asks for any.
$(BASE): pyproject.toml $(BIN)/python
	$(PIP) install -q $(TORCH)
	$(PIP) install -q -e .
	@rm -f $(VENV)/.base-* && touch $@

$(TEST): pyproject.toml $(BASE)
	$(PIP) install -q -e '.[test]'
	@rm -f $(VENV)/.test-* && touch $@

$(LINT): $(BIN)/python
	$(PIP) install -q 'ruff>=0.6'
	@touch $@
