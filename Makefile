# Needs only make and Python >= 3.11 with its venv module. Another Python: make PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV_VERSION := 0.13.8
STAMP := $(VENV)/.installed
# For the tests without Ray. Some of them start two to four processes of their own.
PYTEST_PROCESSES ?= 2
# Of `make gpu-session`.
MINUTES ?= 30

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-ray test-without-ray test-gpu test-null-gpu test-lowest \
  gpu-session lint types test-cluster docs clean

help:
	@echo "make install     environment in $(VENV) with the versions of constraints.txt"
	@echo "make quickstart  train the first job: handwritten digits, 2 workers, 4 candidates, CPU"
	@echo "make test        style, types, import contracts and all tests that need no GPU; parts of"
	@echo "                 it: make lint, types, test-ray, and test-without-ray, which uses two"
	@echo "                 processes (PYTEST_PROCESSES=N for more)"
	@echo "make test-gpu    the tests that need an NVIDIA GPU"
	@echo "make test-null-gpu  CUDA's branches on a device that computes nothing; needs gcc and nm"
	@echo "make test-lowest  the tests without Ray with the lowest declared versions, as Python 3.11"
	@echo "make gpu-session  measure what a GPU is for, MINUTES=30 of it; DATA='{name: cifar100, …}'"
	@echo "make test-cluster  ray up to ray down on your own machines, simulated by network namespaces;"
	@echo "                 needs root, openssh-server, rsync and iproute2"
	@echo "make docs        the generated parts of docs/: job file and records"
	@echo "make clean       remove the environment, builds and caches; keeps runs/"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "raytrain_opt needs Python >= 3.11, but $(PYTHON) is" \
	    "$$($(PYTHON) --version 2>&1); choose one: make PYTHON=python3.11 install" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --compile-bytecode \
	  -c constraints.txt -e '.[dev]'
	$(BIN)/python -m compileall -q raytrain_opt
	@touch $@

quickstart: install
	$(BIN)/raytrain-opt run jobs/quickstart.yaml

# The tests with Ray mostly wait for processes; the others use the cores meanwhile.
test: install
	@$(MAKE) -j3 test-ray-runs test-ray-failures test-without-ray lint types

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: install
	$(BIN)/mypy

test-ray: test-ray-runs test-ray-failures

test-ray-%: install
	$(BIN)/pytest --durations=20 tests/ray/$*

# loadfile: a file's fixtures are set up once. No reordering: the files with the longest tests come
# first, so that both processes end at about the same time. No restarts: with them, xdist 3.8 hangs
# at the end after a test has crashed its process (pytest-xdist issue 1378).
test-without-ray: install
	nice $(BIN)/pytest --durations=20 -n $(PYTEST_PROCESSES) --dist loadfile \
	  --no-loadscope-reorder --max-worker-restart=0 tests/multiprocess tests/unit

test-gpu: install
	$(BIN)/pytest -m gpu tests/gpu

test-null-gpu: install
	$(BIN)/pytest tests/null_gpu

test-lowest: install
	$(BIN)/uv venv --quiet --seed --allow-existing --python 3.11 $(VENV)-lowest
	VIRTUAL_ENV=$(CURDIR)/$(VENV)-lowest $(BIN)/uv pip install --resolution lowest-direct -e '.[dev]'
	$(VENV)-lowest/bin/pytest -n $(PYTEST_PROCESSES) --dist loadfile tests/multiprocess tests/unit

gpu-session: install
	$(BIN)/python -m benchmarks.gpu_session --minutes $(MINUTES) \
	  $(if $(DATA),--data '$(DATA)') --out gpu-session

test-cluster: install
	$(BIN)/pytest -m cluster -s tests/cluster

docs: install
	$(BIN)/python -m docs.generate

clean:
	rm -rf $(VENV) $(VENV)-lowest build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
