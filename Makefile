# `make help` lists the targets. Each sets up what it needs; `python3` must be 3.11 or newer.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RANKS ?= 2
WORKERS ?= 2

# What pip is doing: a line for each download, with its size.
SHOW := awk '/^ *(Downloading|Using cached)/ { sub(/^ */, ""); print "  " $$0; fflush() } \
	/^Installing collected/ { print "  Unpacking " NF - 3 " packages"; fflush() }'

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast check lint format types docs clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

$(READY): requirements.txt setup.py pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed (the package itself runs on 3.10)" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the packages of requirements.txt into $(VENV): two minutes or more, PyTorch is the largest"
	$(BIN)/python -m pip install --progress-bar off -r requirements.txt | $(SHOW)
	@echo "Installing this package"
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e . || \
		$(BIN)/python -m pip install --quiet --no-deps -e .
	touch $(READY)

demo: $(READY)  ## train a small transformer privately on real text, on 2 processes
	@echo "Training privately on movie reviews with $(RANKS) processes, then without privacy to compare: 2 to 5 minutes"
	rm -rf runs/demo
	OMP_NUM_THREADS=1 $(BIN)/python examples/train_text_fsdp.py --processes $(RANKS) \
		--grad-sample-mode ghost_fsdp_bk --logdir runs/demo/curves --save runs/demo/model
	@echo
	@echo "Model: runs/demo/model"
	@$(BIN)/python examples/curves.py runs/demo/curves --out runs/demo/curves.png
	@echo
	@echo "What to do next:"
	@echo "  $(BIN)/tensorboard --logdir runs/demo/curves       # the curves, live"
	@echo "  $(BIN)/hf download HuggingFaceTB/SmolLM2-135M --local-dir smollm2"
	@echo "  $(BIN)/python examples/train_text_fsdp.py --processes $(RANKS) --task lm --model smollm2 --lora 8 \\"
	@echo "      --data YOURS.jsonl --batch-size 64 --save runs/mine     # an LLM, your texts"

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(READY)  ## run all tests
	$(PYTEST)

test-fast: $(READY)  ## run the tests that start no process, of the library itself: two minutes
	$(PYTEST) --fast -m "not slow"

check: lint types docs test  ## everything that CI runs: format, lint, types, docs, tests

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(READY)  ## format the code and fix what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(READY)
	$(BIN)/mypy

docs: $(READY)  ## build the documentation into docs/_build
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build
	@echo "Open docs/_build/index.html"

clean:  ## remove what was built
	rm -rf $(VENV) build dist docs/_build *.egg-info .pytest_cache .ruff_cache .mypy_cache
