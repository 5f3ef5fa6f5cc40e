# Every target sets itself up from a bare clone, with Python 3.11 or later and make alone.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-for-flexinspect

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast torture check format bench bench-training bench-generation \
	clean-runs demo-model \
	screenshots dist clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "flexinspect needs Python 3.11 or later; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

setup: $(STAMP) ## make the virtual environment, and compile the sources to bytecode
	@$(BIN)/python -m compileall -q flexinspect hooks tests

demo: setup ## answer two questions with the shipped model and step through what ran
	$(BIN)/flexinspect run --model demo --dataset demo --max-samples 2 --cue "In a sentence:" --overwrite --out demo.flextrace

# Three processes suit two cores, because tests also wait for other processes and for timers. Each
# process has one thread of torch, which does not spin while it waits; tests that need more threads
# set them. Bytecode is written even if the environment forbids it: the suite starts hundreds of
# processes, and each would compile the sources again.
#
# Temporary files are kept in memory where 2 GiB are free for them: a trace is flushed several times,
# so where a disk needs 4 ms to flush, a small trace takes 45 ms there, and 2 ms in memory.
IN_MEMORY := $(shell df -Pm /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 >= 2048 { print "PYTEST_DEBUG_TEMPROOT=" $$6 }')

test: setup ## run the test suite
	$(IN_MEMORY) PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive \
		$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-fast: setup ## run the quick tests that load no torch and start no process
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist worksteal --fast

MINUTES ?= 10
torture: setup ## kills, disk errors, damaged traces and hostile input for MINUTES (10); lists what fails
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.torture --minutes $(MINUTES)

check: setup ## formatting, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy tools benchmarks
	$(BIN)/lint-imports

format: setup ## put formatting right
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .

bench: setup ## run the benchmarks (quiet machine, some minutes); JSON goes to benchmarks/results
	$(BIN)/python -m benchmarks

bench-training: setup ## look for public silent training errors, and for false alarms (some minutes)
	$(BIN)/python -m benchmarks training-bugs
	$(BIN)/python -m benchmarks inferred-invariants

bench-generation: setup ## look for generation errors of unseen programs, and for false alarms
	$(BIN)/python -m benchmarks generation-bugs

RUNS ?= 1000
clean-runs: setup ## record RUNS (1000) correct generations of many kinds, and list every false alarm
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.clean_runs --runs $(RUNS)

demo-model: setup ## train the shipped demo model again (up to 30 minutes on two cores)
	$(BIN)/python -m tools.demo_model

screenshots: setup ## take the README's pictures again, of a real run
	$(BIN)/python -m tools.screenshots

dist: setup ## build wheel and source distribution
	$(BIN)/python -m build

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
