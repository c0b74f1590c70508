# Each target sets up its own virtual environment; nothing else has to be installed first but Python 3.11+ and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: help serve test lint bench simulate mutants clean

help:            ## what there is
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

serve: $(VENV)/.ready   ## serve the default model
	$(BIN)/baton serve

test: lint       ## lint, types, unit tests, kept scenarios, fresh seeds, mutants
	$(BIN)/python -m pytest -n auto
	$(BIN)/baton simulate --mutants

lint: $(VENV)/.ready    ## ruff and mypy --strict
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/mypy

bench: $(VENV)/.ready   ## the figures of docs/performance.md
	$(BIN)/python bench/scheduler.py
	$(BIN)/python bench/prefix_cache.py
	$(BIN)/baton simulate --seeds 0:500 --jobs 1

simulate: $(VENV)/.ready  ## 2,000 seeds of the rehearsal
	$(BIN)/baton simulate --seeds 0:2000

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build
