# make serve   a virtual environment, the demo model, and the server with speculation on
# make test    the tests; make test-slow those that take long
# make check   lint and types

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TARGET ?= smollm2-135m
DRAFT ?= auto
PORT ?= 8000

.PHONY: serve test test-slow check clean

serve: $(VENV)/.installed
	$(BIN)/minispec pull $(TARGET)
	exec $(BIN)/minispec serve --target $(TARGET) --draft $(DRAFT) --port $(PORT)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2

test-slow: $(VENV)/.installed-test
	$(BIN)/minispec pull smollm2-135m
	$(BIN)/python -m pytest -m slow

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "minispec needs Python 3.11 or newer; give one with: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e '.[pull]'
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e '.[pull,test]'
	touch $@ $(VENV)/.installed
