# Two commands do everything on a machine with Python 3.11+ and make:
#   make demo    train the layer against an LSTM on a small copying problem, with a page to open
#   make test    style, types, and the fast tests: every behaviour of the layer
PYTHON ?= python3
VENV   ?= .venv
WORKERS ?= 2
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
LAB    := $(VENV)/.lab
# Bytecode is kept, whatever the environment says: nothing is compiled before it is imported.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-slow style check test-gpu bench site wheel clean
help:
	@grep -E '^#   make' Makefile | sed 's/^#   //'
	@echo "make check     ruff and mypy"
	@echo "make bench     speed on this CPU, beside nn.LSTM; riglstm bench --device cuda on a GPU"
	@echo "make test-slow the tests that take long: frameworks, faults, compilers, wheels"
	@echo "make test-gpu  the tests that need a CUDA device"
	@echo "make site      the guide as a website, in build/site"
	@echo "make wheel     build the package into dist/"
	@echo "make clean     remove the environment and everything built"

define install
	@echo "== creating $(VENV) with $$($(PYTHON) --version), and installing riglstm[$(1)]"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || (echo "riglstm needs Python 3.11 or newer, got $$($(PYTHON) --version); use make PYTHON=..." && false)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# Without compiling all of it to bytecode, which takes as long as the rest: most is never imported.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[$(1)]'
endef

$(READY): pyproject.toml constraints.txt
	$(call install,dev)
	@touch $(LAB) $(READY)

$(LAB): pyproject.toml constraints.txt
	$(call install,lab)
	@touch $(LAB)

demo: $(LAB)
	@echo "== training RigLSTM and an LSTM on a small copying problem, on the CPU"
	$(BIN)/python -m riglstm demo

style: $(READY)
	@echo "== style"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check: style
	@echo "== types"
	$(BIN)/mypy

# One OpenMP thread a worker: two threads beside a busy process slow a step down many times.
# Types are checked beside the tests: alone, that takes one core most of a minute.
test: style
	@echo "== types and tests, on $(WORKERS) workers"
	@$(BIN)/mypy > $(VENV)/types.log 2>&1 & types=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow' -n $(WORKERS) --dist worksteal; tests=$$?; \
	wait $$types; typed=$$?; cat $(VENV)/types.log; test $$tests = 0 && test $$typed = 0

test-slow: $(READY)
	@echo "== slow tests, on $(WORKERS) workers"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow -n $(WORKERS) --dist worksteal

test-gpu: $(READY)
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else \
	  "make test-gpu needs a CUDA device, got none; make test runs what needs none")'
	$(BIN)/python -m pytest tests -m gpu -n 8 -p no:benchmark

bench: $(READY)
	$(BIN)/python -m riglstm bench --device cpu

# The pages link files beside docs/, so the site is made of a copy of the same tree.
PAGES := README.md CONTRIBUTING.md CITATION.cff LICENSE docs examples results protocol src
site: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	rm -rf build/pages && mkdir -p build/pages && cp -R $(PAGES) build/pages
	$(BIN)/python -m mkdocs build --strict

wheel: $(READY)
	$(BIN)/python -m build --wheel --no-isolation --outdir dist

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
