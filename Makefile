# Every target sets up .venv by itself. `make help` lists them.

python := .venv/bin/python
locked_jax := 0.11.2

.PHONY: help setup quickstart test test-slow lint format types ci lock clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

setup: ## make .venv from requirements.lock; PYTHON=... picks the interpreter
	@.ci/setup

quickstart: setup ## train a small model on Shakespeare, about 3 minutes on 2 cores
	$(python) -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart

test: setup ## the tests, but for the slow ones
	$(python) -m pytest -n 2 --dist worksteal -q -m "not slow"

test-slow: setup ## the slow ones: learning, killing, whole models on meshes
	$(python) -m pytest -n 2 --dist worksteal -q -m slow

lint: setup ## ruff: mistakes and formatting
	$(python) -m ruff check
	$(python) -m ruff format --check

format: setup ## let ruff repair what it can
	$(python) -m ruff check --fix
	$(python) -m ruff format

types: setup ## mypy
	$(python) -m mypy

ci: ## what a change must pass
	.ci/run

lock: setup ## resolve requirements.lock anew, within pyproject.toml
	echo jax==$(locked_jax) | $(python) -m uv pip compile --quiet --universal \
	  --python-version 3.12 --no-python-downloads --generate-hashes --upgrade \
	  --extra dev --custom-compile-command "make lock" \
	  --output-file requirements.lock pyproject.toml -

clean: ## remove .venv and caches; runs/ stays
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
