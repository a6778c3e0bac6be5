# `make demo` and `make test` are all a newcomer needs; both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip compiles the modules one by one; COMPILE does so on all cores. It skips templates, which are no Python.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
COMPILE := $(BIN)/python -m compileall -q -j 0 $(VENV) > /dev/null || true

# Baselines of other makers, with what they need and the environment lacks. torchft has no wheel for Python 3.14 yet.
PEERS := deepspeed einops hjson msgpack ninja py-cpuinfo 'torchft; python_version < "3.14"' googleapis-common-protos \
	$(addprefix opentelemetry-,api sdk proto semantic-conventions exporter-http-transport exporter-otlp-common \
	exporter-otlp-proto-common exporter-otlp-proto-http)

.PHONY: demo test test-all oldest campaigns sample lint docs bench gpu install clean

install: $(VENV)/.loops

# The demo needs the trainer alone. torch is installed first and by its exact version: resolving it as somebody's
# dependency could fetch a CUDA stack.
$(VENV)/.trainer: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[train]' matplotlib
	$(COMPILE)
	touch $@

$(VENV)/.installed: $(VENV)/.trainer
	$(PIP) -e '.[dev]'
	# beside the environment, as transformers, torch and DeepSpeed would import them in every process
	$(PIP) --no-deps --target $(VENV)/torchao torchao
	$(PIP) --no-deps --target $(VENV)/triton triton
	# so would accelerate and Lightning these; DeepSpeed without its CUDA kernels, which it would compile
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PIP) --no-deps --upgrade --target $(VENV)/peers $(PEERS)
	$(COMPILE)
	touch $@

# numba compiles loops when they are first called; here, so that ranks do not all do it in their first step. Loops that
# have changed since are compiled anew: a test that waited for the compiler would take more than its seconds.
$(VENV)/.loops: $(VENV)/.installed src/laconic/codec/loops.py $(wildcard src/laconic/*/*_numba.py)
	$(BIN)/python -m tests.support.loops
	touch $@

demo: $(VENV)/.trainer
	$(BIN)/laconic compare --demo --out runs/demo

# Tests that stay in this process: CONTRIBUTING.md says what a tier may touch. They compute all the time, so two workers
# have as many processors.
test test-all campaigns sample: export PYTHONDONTWRITEBYTECODE :=
test: install
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=10

# Tests with processes, sockets, clocks, and libraries of others, and those that compute for long. Three workers, a file
# each: they wait for a third of their time. conftest.py orders the files, the longest first. Hundreds of processes
# import laconic; without its bytecode, each takes a second for that.
test-all: install
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=10 -m '(machine or heavy) and not campaign'

# The core with the oldest torch that it supports, in an environment of its own, which takes some GB: pip has that torch
# with CUDA only.
OLDEST := .venv-oldest
oldest:
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet torch==2.11.0 transformers peft numba hypothesis pytest-timeout pytest-xdist
	PYTHONPATH=src $(OLDEST)/bin/python -m pytest -n 3 tests/codec tests/guard tests/layers tests/optim tests/pipeline tests/ragged tests/rehearse tests/shard

# The tests that both leave out, because they are heavy by nature: see CONTRIBUTING.md.
campaigns: install
	$(BIN)/python -m pytest -n 2 --dist load --durations=10 -m campaign

# Some of them, less than five minutes on two cores: `make sample SEED=7` draws those of seed 7 again.
SEED ?= $(shell date +%Y%m%d%H%M)
sample: install
	@echo "make sample SEED=$(SEED)"
	$(BIN)/python -m pytest -n 2 --dist load --durations=10 -m campaign --sample 400 --seed $(SEED)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m tests.support.house
	$(BIN)/python -m tests.support.record

# The site, in build/site. A broken link or an unknown name in the API reference is an error.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# On a machine with a GPU, whose own Python has torch with CUDA, Triton, numpy and pytest: it installs nothing.
gpu:
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.gpu.report

bench: install
	$(BIN)/python -m benchmarks.wire

clean:
	rm -rf $(VENV) build dist runs
