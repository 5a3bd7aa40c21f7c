# Needs Python >= 3.11 (with venv), make and git. Everything else is installed into .venv by the first target.
.DEFAULT_GOAL := help
.PHONY: help demo test proof realcrm bench lint format clean

# The first of these that is new enough; `make PYTHON=/path/to/python test` chooses another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
RUN := .venv/bin/python -m
ARGS ?=

help: ## say what there is
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

.venv/ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer with venv is needed (Debian: apt install python3-venv)"; exit 1; }
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv (once, about half a minute) ..."
	@$(RUN) pip install --quiet --disable-pip-version-check -e '.[embedded,dev]'
	@touch $@

demo: .venv/ready ## run everything on this machine with a sandbox CRM (ARGS="--once --leads 25")
	@.venv/bin/turnlock demo $(ARGS)

test: .venv/ready ## pass the tests (ARGS="-k name" for some of them)
	@$(RUN) pytest -n auto --dist worksteal $(ARGS)

proof: .venv/ready ## the long ones: kill runs, quiet waits, fuzz
	@$(RUN) pytest -m proof --timeout 900 -n auto --dist worksteal --ignore tests/kill $(ARGS)
	@$(RUN) pytest -m proof --timeout 900 tests/kill $(ARGS)

realcrm: .venv/ready ## route the leads of a real BottleCRM, installed for it (Python >= 3.12; first time 5 minutes)
	@$(RUN) tests.realcrm.bottlecrm_up can
	@$(RUN) pytest -m realcrm tests/realcrm $(ARGS)

bench: .venv/ready ## the stopwatch: ratios against a floor in the same run; writes docs/benchmarks.md (ARGS=past for one part)
	@$(RUN) tests.bench.stopwatch $(ARGS)

lint: .venv/ready ## style, types, import contracts, manifest
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy
	@.venv/bin/lint-imports
	@.venv/bin/turnlock manifest check

format: .venv/ready ## put the style right
	@$(RUN) ruff check --fix --quiet .
	@$(RUN) ruff format --quiet .

clean: ## remove what the targets made
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
