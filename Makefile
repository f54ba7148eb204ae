# `make demo` is the whole way from a clean checkout to the demo's figures.
# Another interpreter: make setup PYTHON=python3.12. Another environment: make test VENV=~/envs/grkv.
# Figures of the demo as data: make demo DEMO_ARGS='--json demo.json'.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.grkv-setup
SUDO = $(if $(filter 0,$(shell id -u)),,sudo)

.PHONY: setup model browser demo test lint docs

setup: $(STAMP)

# About 11 GB with SGLang's CUDA libraries; only repeated when the declared or pinned dependencies change.
$(STAMP): pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint requirements.lock --editable '.[test,dev]'
	touch $@

model: setup
	$(BIN)/grkv model

# The pages of `grkv chat` and `grkv rag` are tested in a real browser, which no package on PyPI carries.
browser:
	@command -v chromium || command -v google-chrome || ($(SUDO) apt-get update -qq && \
		$(SUDO) apt-get install --yes --quiet=2 --no-install-recommends chromium)

demo: model
	$(BIN)/grkv demo $(DEMO_ARGS)

# Two processes with one thread each: servers spend most of their time on one core, starting and decoding.
test: model browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup
	$(BIN)/mkdocs build --strict
