# Everything on a fresh machine: `make demo` and `make test` set themselves up.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo paper-small results test test-slow test-harness test-peers torture lint format wheel bench clean setup

setup: $(VENV)/.ready

# torch first and by its exact version: the plain name would bring gigabytes of CUDA with it.
$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "Setting up $(VENV): torch, then psidiff and its development tools (minutes, once)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) $$(grep '^torch==' constraints.txt)
	$(PIP) --editable '.[dev]'
	@touch $@

demo: setup
	$(BIN)/psidiff demo

test: setup
	$(BIN)/python -m pytest --numprocesses 2

test-slow: setup
	$(BIN)/python -m pytest -m slow --numprocesses 2 --dist loadfile

# The evaluation harness brings 400 MB with it, so only this asks for it.
test-harness: setup
	$(PIP) --editable '.[harness]'
	$(BIN)/python -m pytest tests/test_harness.py tests/test_published.py

# Tools of others that nobody here wrote, in an environment beside: LiteLLM wants an older client.
PEERS := .peers-venv

test-peers: setup
	$(BIN)/python -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check \
	  litellm schemathesis basedpyright
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > \
	  "$$($(PEERS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/beside.pth"
	PYTHONPATH=src $(PEERS)/bin/python -m pytest tests/peers

# Attempts to break it, within so many minutes; their numbers add up in out/torture.jsonl.
MINUTES ?= 10
SEED    ?= 0
AREA    ?=

torture: setup
	$(BIN)/python -m tests.torture --minutes $(MINUTES) --seed $(SEED) --area "$(AREA)"
	$(BIN)/python -m tests.torture --table

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: setup
	$(PIP) 'hatchling>=1.25'
	$(BIN)/python -m hatchling build -t wheel

# Every table and figure of the paper on small stand-ins, as out/paper-small/index.html.
paper-small: setup
	$(BIN)/python benchmarks/paper/reproduce.py --small

# docs/results.md from the measured lines in docs/results.
results: setup
	$(BIN)/python experiments/results.py

bench: setup
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/train_overhead.py
	$(BIN)/python benchmarks/sampling.py

clean:
	rm -rf $(VENV) $(PEERS) .ci-venv dist out
