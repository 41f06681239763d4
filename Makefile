# Every target makes and fills .venv itself. Needed: Python 3.11 or newer, make, and a package index.
#
#   make PYTHON=python3.12 test      another interpreter for .venv
#   make PY=python3 gpu-check        an environment of your own, used as it is; nothing is installed

PYTHON ?= python3
VENV ?= .venv
PY ?= $(VENV)/bin/python
GLASSBLOCK ?= $(VENV)/bin/glassblock
CHECKPOINTS ?= examples
PORT ?= 8080
BENCHMARKS ?= cold_block tensor_wire audit_speed jacobian_norms block_speed

SERVICE := $(VENV)/.service-installed
DEV := $(VENV)/.dev-installed
FETCH := $(VENV)/.fetch-installed
ifneq ($(origin PY),file)
SERVICE :=
DEV :=
FETCH :=
export PYTHONPATH := $(CURDIR)/service:$(CURDIR)/clients
endif

PYTEST := $(PY) -m pytest
# Two workers on two cores: without this each starts a thread per core and both wait for each other.
ONE_THREAD := OMP_NUM_THREADS=1

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test long check real ci evidence bench serve gpu-check openapi schema smollm2 constraints test-docker clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(SERVICE) ## audit the shipped example, plant a swap in a copy, audit that
	$(GLASSBLOCK) demo

test: $(DEV) ## unit tests, under two minutes
	$(ONE_THREAD) $(PYTEST) -n 2 -m 'not long and not real and not gpu'

long: $(DEV) ## the unit tests that take longer
	$(ONE_THREAD) $(PYTEST) -n 2 -m 'long and not real and not gpu'

check: $(DEV) ## lint, format, layers, types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -c 'from importlinter.cli import lint_imports_command as lint; lint(["--no-logo"])'
	$(PY) -m basedpyright --pythonpath $(PY)

real: $(DEV) ## tests on real weights (SmolLM2, fetched once into a cache)
	$(ONE_THREAD) $(PYTEST) -n 2 -m real

ci: ## check, test, long and real; what .ci/run runs
	$(MAKE) check
	$(MAKE) test
	$(MAKE) long
	$(MAKE) real

evidence: $(DEV) ## the long proofs, written to docs/evidence
	@set -e; for name in null_study screening power tiny_training gemma faults explain fuzzing readers load jobs streaming big_files; do echo "== evidence/$$name.py"; $(PY) "evidence/$$name.py"; done

bench: $(DEV) ## every benchmark, one after the other; writes benchmarks/RESULTS.md
	@set -e; echo "# Results of make bench" > benchmarks/RESULTS.md.new; \
	for name in $(BENCHMARKS); do PYTHONPATH="tools:$$PYTHONPATH" $(PY) benchmarks/$$name.py >> benchmarks/RESULTS.md.new; done
	@cat benchmarks/RESULTS.md.new
	mv benchmarks/RESULTS.md.new benchmarks/RESULTS.md

serve: $(SERVICE) ## the service on 127.0.0.1 (CHECKPOINTS=folder, PORT=8080)
	$(GLASSBLOCK) serve --checkpoints $(CHECKPOINTS) --port $(PORT)

gpu-check: $(DEV) ## load, CPU/GPU parity and an audit on a CUDA machine, under four minutes
	$(PYTEST) -m gpu

openapi: $(SERVICE) ## write docs/openapi.json
	$(PY) -m glassblock.api.openapi > docs/openapi.json.new
	mv docs/openapi.json.new docs/openapi.json

schema: $(SERVICE) ## write docs/report.schema.json
	$(PY) -m glassblock.reports.schema > docs/report.schema.json.new
	mv docs/report.schema.json.new docs/report.schema.json

smollm2: $(FETCH) ## fetch SmolLM2-135M into the cache
	$(PY) tools/smollm2.py

constraints: $(VENV)/.made ## write constraints.txt anew: keeps its pins, adds what pyproject.toml asks for
	$(VENV)/bin/python -m pip install --quiet uv
	{ grep '^#' constraints.txt && $(VENV)/bin/python -m uv pip compile --quiet --universal --python-version 3.11 --all-extras \
	  --no-annotate --no-header --constraint constraints.txt pyproject.toml; } > constraints.txt.new
	mv constraints.txt.new constraints.txt

test-docker: $(DEV) ## build the image and run it on a real engine (Linux; root where no engine runs yet)
	$(PY) tests/docker/run.py

clean: ## remove .venv and what tools left behind; the weights' cache stays
	rm -rf $(VENV) build dist service/*.egg-info clients/*.egg-info *.egg-info
	rm -rf .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find service clients tests tools benchmarks examples evidence -name __pycache__ -type d -exec rm -rf {} +

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not here: install Python 3.11 or newer, or name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1); name another: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Seen from the folder that it lies in, a clone called glassblock hides an editable install: paths come before names.
ON_THE_PATH = $(PY) -c 'import pathlib, sys, sysconfig; pathlib.Path(sysconfig.get_path("purelib"), "glassblock-clone.pth").write_text("\n".join(sys.argv[1:]) + "\n")' "$(CURDIR)/service" "$(CURDIR)/clients"

# `make demo` needs the service alone; the tools of `make test` come on top, into the same .venv.
$(VENV)/.service-installed: pyproject.toml constraints.txt | $(VENV)/.made
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[service]'
	@$(ON_THE_PATH)
	@touch $@

$(VENV)/.dev-installed: pyproject.toml constraints.txt | $(VENV)/.made
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@$(ON_THE_PATH)
	@touch $(VENV)/.service-installed $(VENV)/.fetch-installed $@

# What tools/smollm2.py imports.
$(VENV)/.fetch-installed: constraints.txt | $(VENV)/.made
	$(PY) -m pip install --quiet --constraint constraints.txt gguf safetensors tokenizers torch
	@touch $@
