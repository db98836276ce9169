# KLeash: every target sets up what it needs, once, in .venv.
#
#   make lab      install, fetch the bundled model, run the lab, print the path of its report
#   make test     install the development tools too and run the fast tests
#   make check    format, lint, type-check, check the direction of imports
#   make help     the rest

PYTHON ?= python3
VENV ?= .venv
PRESET ?= standard
SEED ?= 0
OUT ?= runs/lab
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
# In CI a file that is not formatted is an error; at a desk it is formatted.
FORMAT_ARGS := $(if $(CI),--check)

.PHONY: help install install-dev lab test test-slow test-peers check format benchmark constraints clean
.DEFAULT_GOAL := help

help:
	@echo "make lab [PRESET=quick|standard|full] [SEED=0] [OUT=runs/lab]   the lab on the bundled model"
	@echo "make test [PYTEST_ARGS=...]   the fast tests"
	@echo "make test-slow     the tests that need the bundled model"
	@echo "make test-peers    the comparisons with TRL"
	@echo "make check         format, lint, types, import directions"
	@echo "make install       the package alone, in $(VENV)"
	@echo "make install-dev   the package with development tools and every extra the tests use"
	@echo "make benchmark     speed and memory against TRL"
	@echo "make constraints   write constraints.txt from the environment in $(VENV)"
	@echo "make clean         remove $(VENV) and the tools' caches"
	@echo "PYTHON=python3.12 chooses the interpreter (3.11 or later for the pinned versions)."

# The virtual environment. Made again only when it is missing.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "constraints.txt needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
	       "Choose another: make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV) || { \
	  echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv"; \
	  rm -rf $(VENV); exit 2; }

# Stamps: installed again only when the dependencies change. The package itself is editable.
$(VENV)/installed: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed pyproject.toml constraints.txt
	$(PIP) -e '.[dev,peers,trackers,verifiers]'
	@touch $@

install: $(VENV)/installed
install-dev: $(VENV)/installed-dev

lab: $(VENV)/installed
	$(BIN)/kleash lab --preset $(PRESET) --seed $(SEED) --out $(OUT)

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -q -m "not slow and not peers" $(PYTEST_ARGS)

test-slow: $(VENV)/installed-dev
	$(BIN)/python -m pytest -q -m slow $(PYTEST_ARGS)

test-peers: $(VENV)/installed-dev
	$(BIN)/python -m pytest -q -m peers $(PYTEST_ARGS)

check: $(VENV)/installed-dev
	$(BIN)/ruff format $(FORMAT_ARGS) src tests
	$(BIN)/ruff check $(if $(CI),,--fix) src tests
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/installed-dev
	$(BIN)/ruff format src tests
	$(BIN)/ruff check --fix src tests

benchmark: $(VENV)/installed-dev
	$(BIN)/python -m benchmarks

# pip and the package itself are left out; a local version label (+cpu) names a build, not a release.
constraints: $(VENV)/installed-dev
	@{ sed -n '/^#/p' constraints.txt; \
	   $(BIN)/python -m pip freeze --exclude-editable --all | grep -viE '^(pip|kleash)[ =]' | sed 's/+[a-z0-9.]*$$//'; \
	 } > constraints.new && mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
