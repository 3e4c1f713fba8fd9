# make demo    plan, prove and train a small language model here     make test    everything that CI checks
# Each target does its own set-up. On Linux without a GPU, the small CPU build of torch is at
# make ... PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS) -c constraints.txt
HAVE_PIP := $(BIN)/python -c "import pip" 2>/dev/null || $(BIN)/python -m ensurepip

# pyright asks the network for newer versions of itself unless it is told not to.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format readme prove-matrix clean

help: ## show the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1@\2/p' $(MAKEFILE_LIST) | awk -F@ '{ printf "%-22s %s\n", $$1, $$2 }'

setup: $(VENV)/installed-dev ## create .venv with all that make demo and make test need

demo: $(VENV)/installed ## plan, prove and train a small language model on this machine
	$(BIN)/echelon demo

test: check ## run make check, then every test
	$(BIN)/python -m pytest

check: $(VENV)/installed-dev ## check format, lint, types, import floors and file sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_house.py

format: $(VENV)/installed-dev ## format the code and mend what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

readme: $(VENV)/installed-dev ## write the blocks of README.md that show output again
	$(BIN)/python -m tests.readme

prove-matrix: $(VENV)/installed ## prove every layout of the matrix, of up to sixteen ranks (long; picks up where it stopped)
	@mkdir -p runs
	$(BIN)/python -m echelon.prove.matrix --all --results runs/matrix.jsonl

clean: ## remove .venv and caches (runs/ is yours and stays)
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache .hypothesis

# A stamp is newer than what it was installed from; pip then has nothing to do. An environment that
# something else made, or that was interrupted, may lack pip.
$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing echelon into $(VENV) ..."
	@$(HAVE_PIP)
	@$(PIP) -e ".[train]"
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing echelon and its development tools into $(VENV) ..."
	@$(HAVE_PIP)
	@$(PIP) -e ".[train,data,dev]"
	@touch $@ $(VENV)/installed

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11; name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 3; }
	@rm -f $(VENV)/installed $(VENV)/installed-dev
	@$(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "error: $(PYTHON) -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 3; }
