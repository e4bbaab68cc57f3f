# `make` lists the targets. Everything is installed into .venv, once, and again when pyproject.toml,
# constraints.txt or the native core change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet -c constraints.txt

# Debian packages that the tests need, beside Python, git, make and gcc: a browser for the page, and
# network namespaces for the slow link (tests of which are skipped without root).
TEST_PACKAGES := chromium iproute2
TESTS ?= tests undertow
WORKERS ?= 2
NATIVE := $(wildcard undertow/native/*.c undertow/native/*.h)

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench picture clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.run ## set up, then show what undertow does
	$(BIN)/undertow demo
	$(BIN)/undertow train --html training.html

test: $(VENV)/.test ## set up, then run all tests
	scripts/debian.sh $(TEST_PACKAGES)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 10 $(TESTS)

lint: $(VENV)/.lint ## format, style, types and imports between rooms
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.lint ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.test ## run all benchmarks
	set -e; for file in $$(grep -l __main__ bench/*.py); do \
		echo "== $$file"; $(BIN)/python -m bench.$$(basename $$file .py); done

picture: $(VENV)/.test ## draw the README's picture of the page anew
	scripts/debian.sh chromium
	$(BIN)/python -m scripts.page_picture

clean: ## remove the environment and what was built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache
	rm -f undertow/native/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Debian's Python comes without its venv module; install that where it is so.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: undertow needs Python 3.11 or later; name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { scripts/debian.sh python3-venv && $(PYTHON) -m venv --clear $(VENV); }

# It comes without its headers, too. They are for the native core, and all works without that.
HAS_HEADERS := import os, sysconfig as s; assert os.path.exists(s.get_path("include") + "/Python.h")

$(VENV)/.run: $(BIN)/python pyproject.toml constraints.txt $(NATIVE)
	@$(BIN)/python -c '$(HAS_HEADERS)' 2>/dev/null || scripts/debian.sh python3-dev || \
		echo "there is no Python.h: the solver runs in Python"
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(PIP_INSTALL) -e '.[test]'
	@touch $@

$(VENV)/.lint: $(VENV)/.run
	$(PIP_INSTALL) -e '.[lint]'
	@touch $@
