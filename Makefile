# Two commands do everything on a fresh machine: `make demo` and `make test`. They make .venv first.
# PYTHON=python3.12 picks an interpreter, WHEELS=folder installs offline, JOBS=4 runs as many tests
# at a time (3 suit two cores: some wait for clocks and processes), each a stretch of files, so that what a file's
# tests share is made once.

PYTHON ?= python3
JOBS ?= 3
PORT ?= 8501
RECORD ?= h200
SUITES ?= ceilings quick memory page-size paged-ladder decode-batch gqa mla kv-dtype shared-prefix decode-features \
  prefill-features cache-writes peers ladder block-size precision layout crossover scaling roofline

PY := .venv/bin/python
READY := .venv/ready

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu dashboard record sizes lint clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): requirements.txt pyproject.toml cuattn/setup_env.py
	@$(PYTHON) cuattn/setup_env.py

demo: $(READY)  ## run suite `quick` on the best machine here and show the results
	@$(PY) -m experiments run quick
	@echo "Parquet:   $$(ls -t runs/*/part.parquet | head -n 1)"
	@echo "Dashboard: make dashboard   (or: $(PY) -m streamlit run dashboard/app.py)"

test: $(READY)  ## all tests; those for a GPU only where there is one
	@$(PY) -m pytest -n $(JOBS) --dist worksteal

test-gpu: $(READY)  ## the tests that need a GPU
	@$(PY) -m pytest -m gpu -rs

dashboard: $(READY)  ## open the dashboard in the browser
	@$(PY) -m streamlit run dashboard/app.py --server.port $(PORT)

# Of a suite already there only what has aged is taken anew; remove its folder for all of it.
record: $(READY)  ## run the recorded suites on this GPU into experiments/recorded/RECORD
	@set -e; for suite in $(SUITES); do out=experiments/recorded/$(RECORD)/$$suite; \
	  if [ -e $$out/manifest.json ]; then $(PY) -m experiments record $$out; \
	  else $(PY) -m experiments run $$suite --machine gpu --out $$out; fi; done

sizes: $(READY)  ## the longest files and functions, and lines that stand twice
	@$(PY) tests/sizes.py

lint: $(READY)  ## ruff
	@$(PY) -m ruff check .

clean:  ## remove .venv and caches; runs stay
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
