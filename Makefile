# Everything an operator or an engineer does, as one command each. `make help` lists them.

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
SKYPILOT := .venv-skypilot
INSTALL := ./deployments/install.sh $(BIN)/python
# Many processes import the same modules: they are compiled once, here on all cores, but for those that few need.
unexport PYTHONDONTWRITEBYTECODE
SELDOM := /(_dynamo|_inductor|networkx|pip|sympy|testing|tests|transformers)/
COMPILE := $(BIN)/python -m compileall -q -j 0 -x '$(SELDOM)' $(VENV)/lib > /dev/null || true

# Settings of the local network; each is a variable of `make run` and `make up`.
WINDOWS ?= 10
MINERS ?= 2
STORE ?= s3
PRESET ?= local
WINDOW_SECONDS ?=
HOUR_SECONDS ?= 3600
PREFECT_PORT ?= 4200
STORAGE_PORT ?= 9200
LOCAL = $(BIN)/python -m deployments
LOCAL_OPTIONS = --miners $(MINERS) --store $(STORE) --preset $(PRESET) \
	$(if $(WINDOW_SECONDS),--window-seconds $(WINDOW_SECONDS)) --hour-seconds $(HOUR_SECONDS) \
	--prefect-port $(PREFECT_PORT) --storage-port $(STORAGE_PORT)

.DEFAULT_GOAL := help
.PHONY: help run up down status gauntlet test test-slow test-long lint format bench gpu faults incentive screenshot clean

help: ## List the commands.
	@grep -E '^[a-z.-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

run: $(VENV)/.run ## Train a whole network on this machine for some windows, and say what came of it.
	@$(LOCAL) run --windows $(WINDOWS) $(LOCAL_OPTIONS)

FOLLOW ?=
up: $(VENV)/.run ## The same network, left running until `make down`; with FOLLOW=1 it says what goes wrong.
	@$(LOCAL) up $(LOCAL_OPTIONS) $(if $(FOLLOW),--follow)

down: ## Stop what `make up` started.
	@if [ -x $(BIN)/python ]; then $(LOCAL) down; else echo "nothing was running"; fi

status: ## Show what runs of it, and how the newest windows of each neuron went.
	@if [ -x $(BIN)/python ]; then $(LOCAL) status; else echo "nothing is running"; fi

ENDPOINT ?= moto
gauntlet: $(VENV)/.dev ## Attack a network on a real S3 endpoint, and say what came of it; ENDPOINT=rclone for another one.
	@$(BIN)/python -m lab.adversary --where s3 --endpoint $(ENDPOINT)

# The only tests with a Prefect server: each process of such a call collects no more than these (tests/conftest.py).
PREFECT := $(addprefix tests/,blocks deployments flows tasks network/test_clouds.py test_window.py)

test: $(VENV)/.dev ## Run the tests.
	$(BIN)/python -m pytest -m "not slow and not prefect" --ignore tests/network --numprocesses 2 --dist loadfile
	$(BIN)/python -m pytest -m "not slow and prefect" --numprocesses 2 --dist loadfile $(PREFECT)

test-slow: $(VENV)/.dev $(SKYPILOT)/.made ## Run the tests that take minutes.
	@./deployments/debian.sh postgresql prometheus
	$(BIN)/python -m pytest -m "slow and not long and not prefect" --ignore tests/network --numprocesses 4 --maxschedchunk 2
	$(BIN)/python -m pytest -m "slow and not long and prefect" --numprocesses 3 --dist loadfile $(PREFECT)
	$(BIN)/python -m pytest -m "not long" --durations 12 tests/network/test_network.py

test-long: $(VENV)/.dev ## Run more of the same cases than CI has time for.
	$(BIN)/python -m pytest -m "long and not prefect" --ignore tests/network --numprocesses 4 --maxschedchunk 2
	$(BIN)/python -m pytest -m "long and prefect" $(PREFECT)

lint: $(VENV)/.dev ## Format check, lint, types, import contracts, rules of the house.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports
	$(BIN)/python -m tests.house

format: $(VENV)/.dev ## Format the code.
	$(BIN)/ruff check --fix --exit-zero --quiet .
	$(BIN)/ruff format .

bench: $(VENV)/.dev ## Measure all figures of the README again; takes hours.
	$(BIN)/python -m benchmarks.keep

gpu: $(VENV)/.dev ## On a machine with a CUDA device: its tests, then the trainer beside a bare loop on it, as JSON.
	$(BIN)/python -m pytest $(wildcard tests/*/test_*_cuda.py) tests/scoring/test_scoring_measure_devices.py
	$(BIN)/python -m benchmarks.training --device cuda

SEEDS ?= 20
FIRST ?= 1
faults: $(VENV)/.dev ## Run small networks with faults drawn from SEEDS seeds, and check the invariants in every window.
	$(BIN)/python -m benchmarks.faults --seeds $(SEEDS) --first $(FIRST)

incentive: $(VENV)/.dev ## Pay 20 honest miners and cheats of every kind for 60 windows, and report who earned what; takes hours.
	$(BIN)/python -m benchmarks.incentive --population all

screenshot: $(VENV)/.dev ## Take the README's picture of the UI; needs `make up` and Debian's chromium.
	$(BIN)/python -m docs.screenshot --port $(PREFECT_PORT)

.venv: $(VENV)/.run ## Create the virtual environment.

# SkyPilot has a virtual environment of its own: its bounds of click and uvicorn exclude those of constraints.txt.
$(SKYPILOT)/.made:
	$(PYTHON) -m venv $(SKYPILOT)
	$(SKYPILOT)/bin/python -m pip install --quiet skypilot==0.14.1
	@touch $@

clean: down ## Remove what the commands above made, but not the virtual environments.
	rm -rf .templar .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# What to run, and beside it what to develop. The stamps make a second call free.

$(VENV)/bin/python:
	@./deployments/debian.sh
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml lab/pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[local]' --editable ./lab
	@$(COMPILE)
	@touch $@

$(VENV)/.dev: pyproject.toml lab/pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[dev]' --editable ./lab
	@$(COMPILE)
	@touch $@ $(VENV)/.run
