# Needs only make and Python >= 3.11 with its venv module. Another Python: make PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV_VERSION := 0.13.8
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-gpu lint types pytest test-cluster clean

help:
	@echo "make install     environment in $(VENV) with the versions of constraints.txt"
	@echo "make quickstart  train the first job: handwritten digits, 2 workers, 4 candidates, CPU"
	@echo "make test        style, types, import contracts and all tests that need no GPU"
	@echo "make test-gpu    the tests that need an NVIDIA GPU"
	@echo "make test-cluster  own machines from ray up to ray down, on hosts made of namespaces;"
	@echo "                 needs root, openssh-server, rsync and iproute2"
	@echo "make lint        style and import contracts only"
	@echo "make types       types only"
	@echo "make clean       remove the environment, builds and caches; keeps runs/"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "raytrain_opt needs Python >= 3.11, but $(PYTHON) is" \
	    "$$($(PYTHON) --version 2>&1); choose one: make PYTHON=python3.11 install" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install -c constraints.txt -e '.[dev]'
	@touch $@

quickstart: install
	$(BIN)/raytrain-opt run jobs/quickstart.yaml

test: lint types pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: install
	$(BIN)/mypy

pytest: install
	$(BIN)/pytest

test-gpu: install
	$(BIN)/pytest -m gpu tests/gpu

test-cluster: install
	$(BIN)/pytest -m cluster -s tests/cluster

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
