# Two commands are meant for everybody: `make pretrain` and `make test`. `make help` lists the rest.

PYTHON ?= python3
# The torch that the tests run on; the package itself accepts 2.10 and newer.
TORCH ?= torch==2.13.0
# Your own text for `make pretrain`: a .txt, .jsonl, .jsonl.zst or a folder of them.
DATA ?=
# How many iterations `make pretrain` trains for; its own default when empty.
ITERATIONS ?=
# Where `make pretrain` puts everything; a folder under runs/ named after the data when empty.
OUT ?=
# Anything: `make test-matrix` puts its table into docs/parallelism.md, `make test-faults` its two into
# docs/reliability.md and docs/checkpoints.md, `make soak` its picture beside them, `make soak-serving` its tables
# into docs/serving.md, `make test-damage` its own there,
# `make kernel-resources` into benchmarks/results/.
WRITE ?=
# How long `make soak` and `make soak-serving` last; 60 and 10 when empty.
MINUTES ?=
# What ranks of `make soak-serving` have parts of: tensor (when empty) or stages.
SHARES ?=
# The words of one composition, for `make test-matrix`; all of them when empty.
CASE ?=
# A word of the mutants to try, for `make test-mutants`; all of them when empty.
ONLY ?=
# Test processes that run side by side: one more than the cores, because some tests wait.
JOBS ?= 3

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help venv pretrain test test-all test-matrix test-faults test-damage test-reshard test-mutants soak soak-serving quick gates bytecode bench kernel-resources docs docs-site clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

venv: $(READY)  ## make .venv with everything that training and the tests need

$(READY): pyproject.toml setup.py $(wildcard csrc/*/*) Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; found $$($(PYTHON) --version). fix: make PYTHON=python3.12 ..."; exit 1; }
	@echo "making $(VENV) (once; torch is a large download)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip setuptools wheel "pybind11>=2.11" ninja py-cpuinfo
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -e '.[test,docs]'
	@touch $@

pretrain: $(READY)  ## text to a trained, sampled GPT in minutes; DATA=my.txt for your own text
	@$(BIN)/python -m tools.first_run $(if $(DATA),--data "$(DATA)") $(if $(OUT),--out "$(OUT)") $(if $(ITERATIONS),--iterations $(ITERATIONS))

# Ranks and programs are started by the thousand, and each would compile what it imports again.
PACKAGES := megatron tools tasks tests benchmarks
# PYTHONDONTWRITEBYTECODE= lets pytest keep the assertions that it rewrites, for its other processes.
bytecode: $(READY)
	@$(BIN)/python -m compileall -q -j 0 $(PACKAGES)

test: gates bytecode  ## everything that has to pass: gates, then all tests but the wide grids
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not wide" tests

test-all: test  ## make test, then what it leaves out: every grid, every kill, all examples
	@echo "make test-all adds to make test: the tests marked wide, four times the examples of every"
	@echo "property, and test-matrix, test-reshard, test-faults and test-damage"
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m wide tests
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --hypothesis-profile full \
	  $$(grep -rlE '@examples\(|@given\(' tests --include='test_*.py')
	@$(MAKE) --no-print-directory test-matrix test-reshard test-faults test-damage

test-matrix: $(READY)  ## every composition of parallelisms against one process; WRITE=1 keeps the table
	@$(BIN)/python -m tests.laws.layouts.matrix $(if $(WRITE),--write) $(if $(CASE),--case "$(CASE)")

test-faults: $(READY)  ## every fault in every phase of a run, and kills at every moment of a save; WRITE=1 keeps the tables
	@$(BIN)/python -m tests.faults.grid $(if $(WRITE),--write)
	@$(BIN)/python -m tests.laws.checkpoints.kill_grid $(if $(WRITE),--write)

soak: $(READY)  ## random faults into a run under the supervisor; MINUTES=60; WRITE=1 keeps the picture
	@$(BIN)/python -m tests.faults.soak $(if $(MINUTES),--minutes $(MINUTES)) $(if $(WRITE),--png docs/goodput.png)

soak-serving: $(READY)  ## requests of all sorts to a server whose ranks are killed, stopped and paused; MINUTES=10
	@$(BIN)/python -m tests.faults.serving_soak $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SHARES),--shares $(SHARES)) $(if $(WRITE),--write)

test-damage: $(READY)  ## flipped bits and other damage to checkpoints; WRITE=1 keeps the table
	@$(BIN)/python -m tests.laws.checkpoints.corruption $(if $(WRITE),--write)

test-reshard: $(READY)  ## every layout's checkpoint loaded at every other layout, 281 pairs
	@$(BIN)/python -m tests.laws.checkpoints.reshard

test-mutants: $(READY)  ## small errors put into a copy of the code, each of which a test has to find; ONLY=word
	@$(BIN)/python -m tests.mutants.run --jobs $(JOBS) $(if $(ONLY),--only "$(ONLY)")

quick: gates bytecode  ## the gates and the unit tests that take no seconds
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not wide and not slow" tests/architecture tests/unit

gates: $(READY)  ## ruff, formatting, mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(READY)  ## tokens/s of this machine beside a plain eager GPT
	@$(BIN)/python benchmarks/train_cpu.py

kernel-resources: $(READY)  ## registers, shared memory and spills of the CUDA kernels, by nvcc; WRITE=1 keeps the table
	@$(BIN)/python -m benchmarks.kernel_resources $(if $(WRITE),--write)

docs: $(READY)  ## write the generated pages of docs/ again: flags.md, assumptions.md
	@$(BIN)/python -m tools.docs.write

docs-site: $(READY)  ## build the documentation with API pages into site/, links checked, without a network
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "wrote site/index.html; to search in it: $(BIN)/python -m http.server --directory site"

clean:  ## remove builds and caches, but neither .venv nor runs/
	rm -rf build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find $(PACKAGES) -name __pycache__ -type d -prune -exec rm -rf {} +
