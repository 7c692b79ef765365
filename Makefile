# One environment for everything: an active virtual environment if there is one, else .venv in this folder.
PYTHON ?= python3
VENV   := $(or $(VIRTUAL_ENV),$(CURDIR)/.venv)
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.octavo-installed

.PHONY: demo test lint bench clean

demo: $(STAMP)  ## a real model says something
	$(PY) -m octavo generate

test: $(STAMP)  ## all tests that need no GPU; kernels are compiled first, or every worker would compile them
	$(PY) -m octavo warmup
	$(PY) -m pytest -n 2

lint: $(STAMP)  ## style and types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

bench: $(STAMP)  ## engine throughput beside Transformers' own generation, on this machine
	$(PY) benchmarks/generate.py

$(STAMP): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $(STAMP)

clean:
	rm -rf $(CURDIR)/.venv build *.egg-info src/*.egg-info
