# make demo    plan, prove and train a small language model here     make test    everything that CI checks
# Each target does its own set-up. On Linux without a GPU, the small CPU build of torch is at
# make ... PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
PIP_FLAGS ?=
# Tests run in a process for each core and one more, as some wait for ranks, which are processes of
# their own; and in no more than four. A worker takes whole files, so that what the tests of a file
# share is made once: the longest first, by tests/file_seconds.toml.
WORKERS ?= $(shell $(PYTHON) -c "import os; print(min(4, (os.cpu_count() or 1) + 1))")
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --workers $(WORKERS) --ignore=tests/test_house.py
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS) -c constraints.txt
HAVE_PIP := $(BIN)/python -c "import pip" 2>/dev/null || $(BIN)/python -m ensurepip

# Modules are compiled once, and not in each of the many processes that tests start.
export PYTHONDONTWRITEBYTECODE :=

# pyright asks the network for newer versions of itself unless it is told not to.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-slow-eighth check format docs web readme prove-matrix walk-plans walk-commands walk-clusters walk-devices walk-round-trips walk-rehearsals clean

help: ## show the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1@\2/p' $(MAKEFILE_LIST) | awk -F@ '{ printf "%-22s %s\n", $$1, $$2 }'

setup: $(VENV)/installed-dev ## create .venv with all that make demo and make test need

demo: $(VENV)/installed ## plan, prove and train a small language model on this machine
	$(BIN)/echelon demo

test: check ## run make check, then the tests (WORKERS=0: in one process)
	$(PYTEST)

test-all: check ## run make check, then the tests, with the long walks that make test shortens
	$(PYTEST) -m "slow or not slow"

test-slow-eighth: $(VENV)/installed-dev ## run the eighth of the slow tests that is this commit's turn (EIGHTH=1 to 8: another), for 20 minutes
	$(PYTEST) -m slow --slow-eighth $(or $(EIGHTH),commit) --at-most 1200

check: $(VENV)/installed-dev ## check format, lint, types of changed files (WHOLE=1: all), import floors and file sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m tests.type_check $(if $(WHOLE),--whole)
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_house.py

format: $(VENV)/installed-dev ## format the code and mend what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/installed-docs ## build the site into build/site: a dead link or an unknown name fails
	$(BIN)/python -m tests.docs.doc_site stage
	$(BIN)/zensical build --clean --strict
	$(BIN)/python -m tests.docs.doc_site check

web: $(VENV)/installed-dev ## build the page of reports and of the explorer, src/echelon/page/page.html, from web/ (needs npm)
	$(BIN)/python -m web.formulas.schema > web/src/document.schema.json
	@mkdir -p build
	$(BIN)/python -m web.formulas.program > build/formulas.js
	mv build/formulas.js web/src/compiled/formulas.js
	cd web && npm ci --no-audit --no-fund && npm run --silent types && npm run --silent build

readme: $(VENV)/installed-dev ## write the blocks of pages that show output, and the generated pages, again
	$(BIN)/python -m tests.docs.readme

prove-matrix: $(VENV)/installed-dev ## prove every layout of the matrix, of up to sixteen ranks (long; picks up where it stopped)
	@mkdir -p runs
	$(BIN)/python -m tests.walks.matrix.walk --all --results runs/matrix.jsonl

walk-plans: $(VENV)/installed-dev ## search for 500 plans at random, and look whether their run files take what was said (minutes)
	$(BIN)/python -m tests.cli.plan.walk 500

walk-commands: $(VENV)/installed-dev ## prove 100 random plans by the command; train, write with, export and resume 40 (hours; picks up where it stopped)
	@mkdir -p runs
	$(BIN)/python -m tests.cli.walks.prove_walk --plans 100 --seed 7 --results runs/proven-plans.jsonl
	$(BIN)/python -m tests.cli.walks.train_walk --runs 40 --seed 8 --results runs/trained-runs.jsonl

walk-clusters: $(VENV)/installed-dev ## compare the smallest cluster that fits with an exhaustive search, in 40 cases (a minute)
	$(BIN)/python -m tests.planner.search.smallest_walk 40

walk-devices: $(VENV)/installed-dev ## plan 100 random runs on fewer and on more devices: more are never slower (minutes)
	$(BIN)/python -m tests.planner.recommend.monotone_walk 100

walk-round-trips: $(VENV)/installed-dev ## take 200 random models of transformers here, train them split, and take them back (minutes)
	@mkdir -p runs
	$(BIN)/python -m tests.training.round_trips.walk --trips 200 --results runs/round-trips.jsonl

walk-rehearsals: $(VENV)/installed-dev ## rehearse every preset and 500 random plans under NCCL's rules, and execute 300 small ones beside (hours)
	$(BIN)/python -m tests.walks.rehearsals.preset_walk --results runs/preset-rehearsals.jsonl
	$(BIN)/python -m tests.walks.rehearsals.executed_walk --plans 300 --results runs/executed-rehearsals.jsonl
	$(BIN)/python -m tests.walks.rehearsals.random_walk --plans 300 --ranks 16 --results runs/rehearsals.jsonl
	$(BIN)/python -m tests.walks.rehearsals.random_walk --plans 200 --ranks 1024 --results runs/rehearsals.jsonl

clean: ## remove .venv, the site and caches (runs/ is yours and stays)
	rm -rf $(VENV) build/docs build/site .cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

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

$(VENV)/installed-docs: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing what builds the site into $(VENV) ..."
	@$(HAVE_PIP)
	@$(PIP) -e ".[docs]"
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11; name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 3; }
	@rm -f $(VENV)/installed $(VENV)/installed-dev $(VENV)/installed-docs
	@$(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "error: $(PYTHON) -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 3; }
