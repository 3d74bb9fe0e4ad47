# offbook: `make setup`, `make demo`, `make test`. Everything is installed into .venv, nothing else is
# touched except that `setup` adds Debian's OpenBLAS where it is missing and may (see BLAS below).

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

VENV  := .venv
PY    := $(VENV)/bin/python
STAMP := $(VENV)/.installed
BLAS  := $(VENV)/.blas

# The MLX wheel of this platform: Metal on Apple silicon, CUDA where asked for, else the CPU build.
EXTRA ?= $(if $(filter Darwin-arm64,$(shell uname -s)-$(shell uname -m)),metal,cpu)

# The first of these that is 3.11 or newer makes the virtual environment.
PYTHONS := python3.11 python3.12 python3.13 python3 python
FIND_PYTHON = for p in $(PYTHON) $(PYTHONS); do \
	  if "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$$p"; break; fi; \
	done

# apt-get needs root: directly, through a sudo that asks nothing, or not at all.
AS_ROOT = $$(if [ "$$(id -u)" = 0 ]; then echo env; else echo sudo -n; fi)

.PHONY: help setup demo test lint types format bench clean

help:  ## Say what there is to make.
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) $(BLAS)  ## Make .venv and install offbook with the MLX of this platform (idempotent).

# A venv needs ensurepip, which Debian ships apart (python3-venv).
$(PY):
	@python=$$($(FIND_PYTHON)); \
	if [ -z "$$python" ]; then echo "offbook needs Python 3.11 or newer (tried: $(PYTHON) $(PYTHONS))" >&2; exit 1; fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	  version=$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	  echo "$$python lacks venv: installing python$$version-venv"; \
	  { command -v apt-get >/dev/null && $(AS_ROOT) apt-get update -qq && \
	    $(AS_ROOT) apt-get install -y -qq "python$$version-venv"; } \
	    || { echo "please install the venv module of $$python (Debian: python$$version-venv)" >&2; exit 1; }; \
	fi; \
	"$$python" -m venv $(VENV)

# Reinstalled when the dependencies or the compiled kernel's sources change; Python files are used in place.
$(STAMP): pyproject.toml $(wildcard setup.py) $(wildcard runtime/kv/*.c runtime/kv/*.cpp runtime/kv/*.h) | $(PY)
	@echo "installing offbook[$(EXTRA),dev] into $(VENV)"
	@PYTHONWARNINGS=ignore $(PY) -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRA),dev]'
	@touch $@

# MLX's CPU wheel links a reference BLAS, some 25 times slower than OpenBLAS. Having it is a matter of
# speed alone, so not being able to install it is worth a line, not a failure. The stamp is written only
# when it is there (or is not for this platform), so that a later `make setup` tries again.
$(BLAS): | $(PY)
	@if [ "$$(uname -s)" != Linux ]; then touch $@; exit 0; fi; \
	has() { $(PY) -c 'import ctypes; ctypes.CDLL("libopenblas.so.0")' 2>/dev/null; }; \
	if ! has && command -v apt-get >/dev/null && { [ "$$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }; then \
	  echo "installing libopenblas0-pthread"; \
	  { $(AS_ROOT) apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive $(AS_ROOT) apt-get install -y -qq libopenblas0-pthread >/dev/null; } || true; \
	fi; \
	if has; then touch $@; else \
	  echo "note: no OpenBLAS (libopenblas.so.0): the CPU backend will be slow; see 'offbook doctor'"; fi

demo: setup  ## Eight villagers, memory for three, killed in mid-run and continuing.
	@$(PY) -m examples.demo

test: setup  ## All tests.
	@$(PY) -m pytest

lint: $(STAMP)  ## Format and lint, as checks.
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .

types: $(STAMP)  ## mypy --strict over the package and the examples.
	@MYPYPATH=.types:. $(PY) -m mypy --namespace-packages --explicit-package-bases -p offbook -p examples

format: $(STAMP)  ## Format in place.
	@$(PY) -m ruff format . && $(PY) -m ruff check --fix .

BENCH := ttft overlap staggered throughput workflow budget capacity perplexity

bench: setup  ## Benchmarks into out/*.json: BENCH="ttft ..." chooses, BENCH_ARGS=--full is longer than --quick.
	@mkdir -p out; for name in $(BENCH); do \
	  echo "== $$name" && $(PY) -m benchmarks.$$name $(or $(BENCH_ARGS),--quick) --json out/$$name.json; \
	done

clean:  ## Remove what was built here (.venv too); models and runtimes' state stay.
	@rm -rf $(VENV) build dist out ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find runtime -name '*.so' -delete
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
