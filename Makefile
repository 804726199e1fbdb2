# `make demo` and `make test` set up all they need in .venv and then run.
# A second run installs nothing: the stamp is newer than what it was made from.

VENV ?= .venv
# PyPI's torch for Linux brings gigabytes of CUDA packages. uv knows where PyTorch's CPU builds are:
#   make test UV_TORCH_BACKEND=cpu
# Extra arguments for torch alone, say another index:
#   make test TORCH_FLAGS="--index-url URL"
UV_TORCH_BACKEND ?=
TORCH_FLAGS ?=
# What makes the environments: the first interpreter that runs and is new enough, or `make PYTHON=...`.
# An environment that is there keeps its own, except a release's.
PYTHON ?= $(firstword $(foreach p,python3 python python3.13 python3.12 python3.11,\
	$(shell $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALL_TORCH := $(if $(UV_TORCH_BACKEND),$(PIP) install -c tools/release-requirements.txt uv && \
	$(BIN)/python -m uv pip install --quiet --python $(BIN)/python,$(PIP) install)
STAMP := $(VENV)/.kvrag-installed
# What the compiled module is made of: a change builds it anew.
NATIVE := CMakeLists.txt $(wildcard cuda/include/kvrag/*.h cuda/host/*.h cuda/host/*.cpp)

# Each process of the tests, and there are many, would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help demo test test-all install-vllm test-vllm check size docs format install clean sanitize train-tiny \
	wheels release matrix notebooks bench-regress

help:
	@echo "make demo     index a few pages, answer questions about them, and compare with full prefill"
	@echo "make test     the tests, except slow ones (minutes)"
	@echo "make test-all make check and make test, then the slow tests; EXHAUSTIVE=1: many more examples and trials"
	@echo "make test-vllm  the tests that need vLLM, in an environment of its own (2.5 GB)"
	@echo "make check    lint, types, layers, spelling and the English of the pages"
	@echo "make size     how large the code, the tests and the pages are; fails if they grew without a reason"
	@echo "make docs     build the documentation's site in build/site"
	@echo "make notebooks  run docs/notebooks and write their pages, with what they print and draw"
	@echo "make bench-regress  ratios of speed and quality against the last release's (seven minutes of processor time)"
	@echo "make format   rewrite the sources in the house's style"
	@echo "make sanitize run the compiled kernels under address, undefined and thread sanitizers"
	@echo "make train-tiny  train kvrag-tiny from nothing (hours on two cores; continues when stopped)"
	@echo "make wheels   wheels for x86_64 and aarch64, one for other machines, and sdists, in dist/"
	@echo "make matrix   the core tests over the wheel, for each Python, with the oldest and the newest libraries"
	@echo "make release VERSION=x.y.z  version, changelog, wheels, SBOM, commit and tag; uploads nothing"
	@echo "make clean    remove the environment and all that was built"

# Where the model cannot be installed, the demo says so and takes kvrag-tiny.
demo: $(STAMP)
	@$(BIN)/kvrag models pull smollm2-135m >/dev/null || true
	$(BIN)/kvrag demo

# Three workers for two cores: a third of the time a test waits, for a server, a process or a deadline. Each
# imports all the libraries, hence at most eight.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); n=$$(((3 * n + 1) / 2)); echo $$((n < 8 ? n : 8)))
PYTEST = $(BIN)/pytest -n $(WORKERS) --dist worksteal

test: $(STAMP)
	$(PYTEST) -m "not slow"

# `make test-all -o test` runs make check and what `make test` has left out: the slow tests, each file by one
# worker. With EXHAUSTIVE=1 all run again: kills, flips, made-up input and examples ten times as often and more,
# all instruction sets, and all values of parameters of which usually the first few are tried.
# Only files with slow tests, of their own or of a contract, are collected: the others take each worker ten seconds.
EXHAUSTIVE ?=
SLOW = $(shell grep -rlE 'mark\.slow|_contract import' tests --include='test_*.py')
test-all: check test
	KVRAG_EXHAUSTIVE=$(EXHAUSTIVE) $(PYTEST) --dist loadfile -m slow $(SLOW)
	$(if $(filter-out 0,$(EXHAUSTIVE)),KVRAG_EXHAUSTIVE=1 $(PYTEST) -m "not slow" --hypothesis-profile=full)

# vLLM pins a torch of its own.
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.kvrag-installed

install-vllm: $(VLLM_STAMP)

# Its warnings are its own: only those of ours count as errors, in `make test`.
test-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest -W ignore -q tests/vllm

$(VLLM_STAMP): tests/vllm/install.sh pyproject.toml bench/pyproject.toml $(NATIVE)
	@echo "kvrag: installing vLLM into $(VLLM_VENV) (once; some minutes, 2.5 GB)"
	tests/vllm/install.sh $(VLLM_VENV) $(TORCH_FLAGS)
	@touch $@

check: $(STAMP) size
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell *.md docs kvrag bench tools
	$(BIN)/python -m tools.prose
	$(BIN)/python -m tools.prose --python

# How large the house is; it fails if that grew. REASON="..." records why it may; SAVE=1 records what fell.
size: $(STAMP)
	$(BIN)/python -m tools.size $(if $(REASON)$(SAVE),--save) $(if $(REASON),--reason "$(REASON)") $(if $(TEST_SECONDS),--seconds $(TEST_SECONDS))

# The site asks nothing of other sites; a warning fails the build.
docs: $(STAMP)
	$(PIP) install -c constraints-dev.txt -r docs/requirements.txt
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/site
	@echo "build/site/index.html"

notebooks: $(STAMP)
	@$(BIN)/kvrag models pull smollm2-135m >/dev/null
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.notebooks

# Processor time of one thread. SAVE=x.y.z keeps the results as those of a release.
bench-regress: $(STAMP)
	@$(BIN)/kvrag models pull smollm2-135m >/dev/null || true
	OMP_NUM_THREADS=1 $(BIN)/kvrag bench regress $(if $(SAVE),--save $(SAVE))
	$(if $(SAVE),$(BIN)/python -m tools.releases)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Side by side: a program of the tests takes one core.
sanitize: sanitize-address,undefined sanitize-thread

sanitize-%: $(STAMP)
	$(BIN)/cmake -S . -B build/$@ -DKVRAG_MODULE=OFF -DKVRAG_DRIVER=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
		-DCMAKE_CXX_FLAGS="-fsanitize=$* -fno-sanitize-recover=all" \
		-DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O2 -g1 -DNDEBUG" >/dev/null
	$(BIN)/cmake --build build/$@ -j 2 >/dev/null
	build/$@/kvrag_driver $(if $(filter-out 0,$(EXHAUSTIVE)),3000,500)

# What makes a release has an environment apart: nothing of it runs in kvrag.
RELEASE_VENV ?= .venv-release
RELEASE_PYTHON := $(RELEASE_VENV)/bin/python
RELEASE_STAMP := $(RELEASE_VENV)/.installed

# PYTHON decides which wheels are made: if it names another version, the environment is made again.
ifneq ($(origin PYTHON),file)
ifneq ($(shell $(PYTHON) -V 2>&1),$(shell $(RELEASE_PYTHON) -V 2>&1))
.PHONY: $(RELEASE_STAMP)
endif
endif

$(RELEASE_STAMP): tools/release-requirements.txt
	$(PYTHON) -m venv --clear $(RELEASE_VENV) 2>/dev/null \
		|| { $(PYTHON) -m venv --clear --without-pip $(RELEASE_VENV) \
		&& $(PYTHON) -m pip --python $(RELEASE_PYTHON) install --quiet pip; }
	$(RELEASE_PYTHON) -m pip --disable-pip-version-check --quiet install -r $<
	@touch $@

# The folder is emptied first. MACOS=1 adds a wheel for macOS on arm64, which nobody has run.
DIST ?= dist

wheels: $(RELEASE_STAMP)
	$(RELEASE_PYTHON) -m tools.wheels --out $(DIST) $(if $(MACOS),--mac)

# MATRIX names versions of Python, or paths; without it, all that are installed.
matrix: $(RELEASE_STAMP)
	$(RELEASE_PYTHON) -m tools.matrix --dist $(DIST) $(MATRIX)

# ALSO names the interpreter of the other wheels, or else it is looked for; ADD=... brings them later.
release: $(RELEASE_STAMP)
	@test -n "$(VERSION)" || { echo "name the version: make release VERSION=x.y.z" >&2; exit 2; }
	$(RELEASE_PYTHON) -m tools.release $(VERSION) $(if $(ALSO),--also $(ALSO)) $(if $(ADD),--add $(ADD))

train-tiny: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m kvrag_train.tiny --out build/tiny
	$(BIN)/python -m kvrag_train.export --run build/tiny

install: $(STAMP)

# Some systems ship Python without ensurepip; their pip then fills the environment from outside.
$(BIN)/python:
	$(if $(PYTHON),,$(error kvrag needs Python 3.11 or newer; none was found. Give one: make PYTHON=/path/to/python))
	$(PYTHON) -m venv $(VENV) 2>/dev/null \
		|| { $(PYTHON) -m venv --clear --without-pip $(VENV) \
		&& $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }

# torch goes first and alone, held by the constraints: resolved together with the rest it
# could be a newer build that brings gigabytes of CUDA packages. The two distributions ask for
# each other, so pip has to be given both at once.
$(STAMP): pyproject.toml bench/pyproject.toml constraints-dev.txt $(NATIVE) | $(BIN)/python
	@echo "kvrag: installing into $(VENV) (once; some minutes)"
	$(INSTALL_TORCH) $(TORCH_FLAGS) -c constraints-dev.txt torch
	$(PIP) install -c constraints-dev.txt -e '.[dev]' -e ./bench
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(RELEASE_VENV) build dist kvrag-index .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
