# `make demo` and `make test` are all a newcomer needs; both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench install clean

install: $(VENV)/.installed

# torch is installed first and by its exact version: resolving it as somebody's dependency could fetch a CUDA stack.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	# beside the environment, as transformers would import it in every process
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --target $(VENV)/torchao torchao
	touch $@

demo: install
	$(BIN)/laconic compare --demo --out runs/demo

# Two workers, a file each: many tests wait for processes and sockets more than they compute.
test: install
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

bench: install
	$(BIN)/python -m benchmarks.wire

clean:
	rm -rf $(VENV) build dist runs
