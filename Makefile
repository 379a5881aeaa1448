# `make demo` and `make test` need Python 3.10 or newer and nothing else: they fill .venv once, and again when the pins change.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test
demo: .venv/demo.stamp
	$(BIN)/fxoffload demo

test: .venv/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -n auto

.venv/demo.stamp: .venv/torch.stamp pyproject.toml
	$(INSTALL) --editable '.[demo]'
	touch $@

.venv/dev.stamp: .venv/torch.stamp pyproject.toml
	$(INSTALL) --editable '.[dev,demo]'
	touch $@

# torch comes first and alone, so that nothing that follows chooses another build of it.
.venv/torch.stamp: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) torch
	touch $@
