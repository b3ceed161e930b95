# Everything that a newcomer, a developer and CI run; `make` alone lists it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Processes that run tests, each with a warm server of its own: more than two cores can run, for many tests wait.
WORKERS ?= 4
DIGITS := $(BIN)/torchrun --standalone --nproc_per_node=2 train.py --recipe digits

# Python starts a hundred times, and compiles everything each time where an environment forbids it to keep bytecode.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo format lint check test test-cluster test-dist test-slow durations map mutants chaos fuzz gpu-report test-gpu clean

help:  ## list what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

$(READY): requirements.txt requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed; try make PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement requirements-dev.txt
	@touch $@

setup: $(READY)  ## make .venv with everything that is needed (5.5 GB, one to two minutes)

demo: $(READY)  ## train on real data, on two processes and without a GPU: about a minute on two cores
	$(BIN)/python -m scripts.make_digits data/digits
	$(DIGITS) --overwrite
	$(BIN)/python -m scripts.report runs/digits
	@echo
	@echo 'Next, look at the curves:        $(BIN)/tensorboard --logdir runs/digits'
	@echo 'and train five epochs more:      $(DIGITS) --resume auto --epochs 15 --allow-change epochs'

format: $(READY)  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: $(READY)  ## check style, names, complexity, types, spelling and size
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy --no-error-summary
	$(BIN)/python .ci/size.py

check: lint  ## lint, and run the tests that reach what has changed since BASE, by `make map`: at most a minute
	$(BIN)/python -m tests.check $(BASE)

test: $(READY)  ## run the test suite, without a GPU: five minutes on two cores
	$(BIN)/python -m pytest -m "not slow and not cluster" --numprocesses $(WORKERS) --dist worksteal \
		--junitxml .pytest_cache/tests.xml

test-cluster: $(READY)  ## run the tests that need a Slurm, an MPI or the cores for themselves
	$(BIN)/python -m pytest -m "cluster and not slow"

test-dist: $(READY)  ## run the tests that start several processes
	$(BIN)/python -m pytest -m dist

test-slow: $(READY)  ## run the tests that take long
	$(BIN)/python -m pytest -m slow

durations: test  ## run the test suite and write what it costs, by file and test, into tests/durations.txt
	$(BIN)/python -m tests.durations --write

map: $(READY)  ## note which test reaches which line, for `make check` and `make mutants`
	$(BIN)/python -m tests.reach

mutants: $(READY)  ## plant 500 faults and list those that no test notices; `python -m tests.mutants --help` has more
	$(BIN)/python -m tests.mutants

chaos: $(READY)  ## inject faults into runs, thousands of times, and compare what they leave: some 20 minutes on two cores
	$(BIN)/python -m tests.chaos

fuzz: $(READY)  ## mutate what is read from disk, 10,000 times: some ten minutes on two cores
	$(BIN)/python -m tests.fuzz

gpu-report: $(READY)  ## measure on a GPU what has not been, in at most 20 minutes, or a PART of 1 to 3 in 4
	$(BIN)/python -m bench.gpu_report $(if $(PART),--part $(PART)) $(if $(DATA),--data-path $(DATA))

test-gpu: $(READY)  ## run the tests that need a GPU
	$(BIN)/python -m pytest -m gpu

clean:  ## remove what can be made again, but for runs/
	rm -rf $(VENV) data/digits .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
