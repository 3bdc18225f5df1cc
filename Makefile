# Each target makes the virtual environment itself when it is missing, half-made or older than what it is made from.
# `make PYTHON=python3.12 …` takes another interpreter; ARGS goes to the program: `make demo ARGS="--check"`.

PYTHON ?= python3
ARGS ?=
STAGES ?=
FAKE_OUT := .fake-gpu

VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.complete

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-ranks gpu fake-gpu lint typecheck docs site bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(STAMP)  ## train a small model whose weights do not fit the device
	$(RUN) examples/01_train_gpt.py $(ARGS)

PYTEST = $(RUN) -m pytest --numprocesses logical --maxprocesses 4 --dist worksteal --max-worker-restart 0 \
    -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

# Tests start hundreds of processes, which need not compile hetmem and the tests each.
test test-all test-ranks: export PYTHONDONTWRITEBYTECODE :=

# Of tests with many cases one third, which the commit chooses: the next commits run the others.
test: $(STAMP)  ## run the tests
	$(PYTEST) --third commit $(ARGS)

# Frameworks of others (Lightning, TRL, loggers) are installed for this only: `make test` does without them.
# What the kernels have passed is written down: `make test` then leaves out what only changed kernels need.
test-all: $(STAMP)  ## run every case of them, with new random programs and the real frameworks
	$(RUN) -m pip install --quiet --quiet --editable '.[frameworks]' --constraint constraints.txt
	@kernels=$$($(RUN) -m tests.cuda.verified) && set -x && \
	    $(PYTEST) --all-cases --programs fresh $(ARGS) && \
	    $(if $(ARGS),:,$(PYTEST) --unwatched tests/engine tests/intercept tests/optim) && \
	    $(if $(ARGS),:,$(RUN) -m tests.cuda.verified $$kernels)

test-ranks: $(STAMP)  ## run every case of the tests of several ranks, in six minutes at most on two cores
	$(PYTEST) --all-cases tests/ranks tests/test_example_ranks.py $(ARGS)

lint: $(STAMP) typecheck  ## check style, format and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

typecheck: $(STAMP)  ## check types only
	$(RUN) -m mypy --strict hetmem

docs: $(STAMP)  ## write docs/api.md from the docstrings
	$(RUN) docs/build_api.py

site: $(STAMP)  ## build the documentation as a site in build/site
	$(RUN) -m pip install --quiet --quiet --editable '.[docs]' --constraint constraints.txt
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build

gpu:  ## on a machine with a GPU: what it shows in nine minutes, into $OUT; STAGES=facts,links; installs nothing
	@PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m benchmarks.gpu --stages "$(STAGES)" $(ARGS)

fake-gpu: $(STAMP)  ## the same in small sizes on a device that stands for a GPU: shows that it runs, and no number
	OUT=$${OUT:-$(FAKE_OUT)} $(RUN) -m tests.faked_driver --stages "$(STAGES)" $(ARGS)

bench: $(STAMP)  ## measure what importing hetmem costs
	$(RUN) benchmarks/import_cost.py

clean:  ## remove the virtual environment and all caches
	rm -rf $(VENV) $(FAKE_OUT) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so an interrupted installation is begun anew (--clear) and never half used.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo 'hetmem needs Python 3.10 or newer. Name one: make PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo '$(PYTHON) cannot make virtual environments: install its venv package' \
	           '(Debian, Ubuntu: apt-get install python3-venv) or name another: make PYTHON=/path/to/python3' >&2; exit 1; }
	@echo 'Installing hetmem and its dependencies into $(VENV): about 1.5 GB, a few minutes the first time'
	@$(PYTHON) -m venv --clear $(VENV)
	@$(RUN) -m pip install --quiet --quiet --editable '.[test]' --constraint constraints.txt
	@touch $@
