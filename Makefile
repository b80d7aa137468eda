# Each target sets up what it needs. VENV names the environment to use, made when it is not there.

VENV ?= .venv
CONSTRAINTS ?= constraints.txt
PYTHON ?= python3
SHELL := /bin/bash
# Tests start many processes: none compiles the package again.
export PYTHONDONTWRITEBYTECODE :=
PY := $(VENV)/bin/python
WORKERS ?= 2
# Folders whose long tests `make long` runs.
LONG ?= tests

# Workers side by side on few cores: threads inside operations would only fight for them, and with one
# thread the order of additions, and so each bit of the results, is the same everywhere.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadgroup --durations=10

# Every module of the installed package, without the optional ones that it can use: those for other
# libraries need them.
IMPORT_ALL := import importlib, pkgutil, rkmate; \
	names = [m.name for m in pkgutil.walk_packages(rkmate.__path__, 'rkmate.') \
		if not m.name.startswith('rkmate.integrations.')]; \
	[importlib.import_module(name) for name in names]; \
	print(len(names), 'modules imported from', rkmate.__file__)

# What a user's `pip install` takes: the newest that pyproject.toml allows, of everything but torch, which
# would bring gigabytes of another build.
PLAN_ONE := import torch, rkmate; \
	model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6))); \
	wrapped = rkmate.wrap(model, (torch.randn(256, 64),), budget=0.6, progress=False); \
	wrapped(torch.randn(256, 64)).sum().backward(); \
	print(wrapped.plan)

# One training script for each library that people train with, plain and within a budget: transformers, peft, trl,
# accelerate, Lightning, diffusers.
TOOLS := tests/integrations/test_examples.py tests/integrations/test_transformers.py::test_examples

OLDEST := torch==2.11.0

.PHONY: demo test long slow durations gpu lint docs wheel newest newest-torch oldest-torch versions bench clean help

help:
	@echo "make demo    train a small GPT-2 plain and under half its memory, side by side"
	@echo "make test    the tests, without those that take long; make long: these, without the slow ones"
	@echo "make slow    all tests"
	@echo "make durations  record how long each test takes, in tests/durations.json"
	@echo "make gpu     the tests and benchmarks that need a CUDA device"
	@echo "make lint    ruff and mypy"
	@echo "make docs    the documentation as a site, in out/site"
	@echo "make wheel   build the wheel, install it in an empty environment, import all of it"
	@echo "make newest  install the newest of all dependencies but torch; plan one model, train with each library"
	@echo "make newest-torch  the tests with the newest torch; make oldest-torch: some, with the oldest"
	@echo "make versions      the tests with every release of torch that is supported; writes docs/versions.md"
	@echo "make bench   the benchmarks"
	@echo "make clean   remove what the others made, the environment included"

demo: $(VENV)/.installed-examples
	$(PY) examples/demo.py

# tests/durations.json says which tests take long.
test: $(VENV)/.installed-test
	$(PYTEST) -m "not slow and not long" tests

long: $(VENV)/.installed-test
	$(PYTEST) -m "long and not slow" $(LONG)

slow: $(VENV)/.installed-test
	RKMATE_NEW_EXAMPLES=1 $(PYTEST) -m "slow or not slow" tests

durations: $(VENV)/.installed-test
	rm -rf out/durations
	$(PYTEST) --record-durations out/durations tests
	$(PY) -c "from pathlib import Path; from tests.conftest import write_durations; write_durations(Path('out/durations'))"

# Each piece takes less than ten minutes on a large GPU; its rows are kept in out/gpu.
gpu: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(PY) -m pytest -m gpu tests
	set -e; for piece in check first large compile reserved table auto recorded; do \
		$(PY) benchmarks/gpu.py $$piece --out out/gpu; done

lint: $(VENV)/.installed-dev
	$(PY) -m ruff check .
	$(PY) -m mypy

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "out/site/index.html; with the search: $(PY) -m http.server -d out/site"

wheel: $(VENV)/.installed-dev
	rm -rf build dist .venv-wheel
	$(PY) -m build --wheel
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet --no-compile dist/*.whl -c constraints.txt
	cd dist && ../.venv-wheel/bin/python -c "$(IMPORT_ALL)"
	.venv-wheel/bin/rkmate --version
	rm -rf .venv-wheel

# The whole suite with the newest torch, and with the oldest what shows that it works at all: the import, a
# model, and the self test of each feature that is not torch's documented API.
newest-torch:
	$(MAKE) test long VENV=.venv-newest-torch CONSTRAINTS=constraints-newest.txt
	rm -rf .venv-newest-torch

oldest-torch:
	rm -rf .venv-oldest-torch
	$(PYTHON) -m venv .venv-oldest-torch
	grep -v '^torch==' constraints.txt > .venv-oldest-torch/constraints.txt
	.venv-oldest-torch/bin/python -m pip install --quiet --no-compile -e '.[test]' \
		-c .venv-oldest-torch/constraints.txt "$(OLDEST)"
	OMP_NUM_THREADS=1 .venv-oldest-torch/bin/python -c "$(PLAN_ONE)"
	OMP_NUM_THREADS=1 .venv-oldest-torch/bin/python -m pytest -n $(WORKERS) tests/torch_seam/test_versions.py tests/torch_seam/test_own.py
	rm -rf .venv-oldest-torch

# Every release of torch that was tested, one environment after the other: an hour, and some 3 GB each.
versions: $(VENV)/.installed-test
	$(PY) docs/make_versions.py

newest:
	rm -rf .venv-newest
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --no-compile "$$(grep '^torch==' constraints.txt)"
	.venv-newest/bin/python -m pip install --quiet --no-compile --upgrade --upgrade-strategy eager \
		".[test]" "$$(grep '^torch==' constraints.txt)"
	.venv-newest/bin/python -m pip list --format freeze
	cd .venv-newest && bin/python -c "$(PLAN_ONE)"
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest -n $(WORKERS) -m "slow or not slow" $(TOOLS)
	rm -rf .venv-newest

bench: $(VENV)/.installed-bench
	$(PY) benchmarks/planning.py
	$(PY) benchmarks/solvers.py
	$(PY) benchmarks/peers.py --models all --write
	$(PY) benchmarks/budgets.py --peer --write
	OMP_NUM_THREADS=1 $(PY) benchmarks/lora.py
	OMP_NUM_THREADS=1 $(PY) benchmarks/dtr_tables.py
	OMP_NUM_THREADS=1 $(PY) benchmarks/dtr_beside.py bar static
	OMP_NUM_THREADS=1 $(PY) benchmarks/dtr_figures.py out

clean:
	rm -rf build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .venv .venv-wheel .venv-newest* .venv-oldest-torch .venv-versions
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	$(PYTHON) -m venv $(VENV)

# One stamp per extra: installed again when the dependencies change.
$(VENV)/.installed-%: pyproject.toml $(CONSTRAINTS) | $(PY)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[$*]' -c $(CONSTRAINTS)
	touch $@
