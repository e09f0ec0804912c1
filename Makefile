# Main targets. They need python3.11+, pip, venv, make and git:
#   make demo         explain the photos under assets/ and write overlays to out/
#   make test         run the linter, the type checker and all tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_METHODS := grad_cam layer_cam guided_backprop guided_grad_cam vanilla_gradient

.PHONY: demo test quick lint types unit format notebooks zoo benchmarks clean help

help:
	@sed -n '2,3s/^# */  /p' $(MAKEFILE_LIST)
	@echo "  make quick        run a sample of the tests, without optional dependencies"
	@echo "  make format       format the code, and fix what the linter can fix"
	@echo "  make notebooks    run the notebooks and update their outputs"
	@echo "  make zoo          check guided backpropagation and Grad-CAM on 178 architectures (slow)"
	@echo "  make benchmarks   measure speed and memory (slow; use an idle machine)"

demo: $(VENV)/.installed
	$(BIN)/saliency explain assets --method $(DEMO_METHODS) --sheet --out out

test: lint types unit

quick: $(VENV)/.installed-quick
	OMP_NUM_THREADS=1 $(BIN)/pytest --quick --numprocesses auto --dist worksteal

lint: $(VENV)/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

unit: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist worksteal

format: $(VENV)/.installed-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

notebooks: $(VENV)/.installed-test
	$(BIN)/python -m notebooks

zoo: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.zoo

benchmarks: $(VENV)/.installed-benchmark
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) out build *.egg-info .mypy_cache .pytest_cache .ruff_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "saliency needs Python 3.11 or later; select one with: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.installed-quick: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[quick]"
	touch $@ $(VENV)/.installed

$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test,models]"
	touch $@ $(VENV)/.installed $(VENV)/.installed-quick

$(VENV)/.installed-benchmark: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[benchmark]"
	touch $@ $(VENV)/.installed
