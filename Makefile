# Everything a checkout can do. It needs make and a Python of 3.11 or later, nothing else: the first target that wants
# an environment builds it in .venv, from packages pinned by hash.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
UV = uv==0.13.9
VENV = .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check --quiet
SWEEP ?= $(wildcard tests/crash tests/simulation tests/properties)
ARGS ?=

.DEFAULT_GOAL = help
.PHONY: bench chaos check clean demo docs help live lock sweep test

bench: $(VENV)/dev  ## measure speed, beside the raw commit rate of this disk
	$(BIN)/python -m benchmarks $(ARGS)

chaos: $(VENV)/dev  ## kill, freeze and stop workers at random; ARGS="--seed 7 --rounds 20" says which and how many
	$(BIN)/python tests/crash/chaos.py $(ARGS)

check: $(VENV)/dev  ## lint, format, types, import directions, generated pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/build.py --check

clean:  ## delete everything that can be built again
	rm -rf $(VENV) $(VENV)-lock build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

demo: $(VENV)/run  ## see a worker killed in the middle of a side effect, and what happens next
	$(BIN)/perdure demo $(ARGS)

docs: $(VENV)/run  ## write docs/reference/ from the docstrings and the command line
	$(BIN)/python docs/build.py $(ARGS)

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sort | sed -E 's/^([a-z]+):[^#]*## */\1\t/' | expand -t 10

live: $(VENV)/dev  ## run a small agent on a real model server, if one answers; says so if none does
	$(BIN)/python examples/live_model.py $(ARGS)

lock:  ## pin what pyproject.toml asks for; ARGS=--upgrade takes the newest
	test -x $(VENV)-lock/bin/uv || "$(PYTHON)" -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip --disable-pip-version-check --quiet install $(UV)
	$(VENV)-lock/bin/uv $(COMPILE) $(ARGS) --all-extras --group dev pyproject.toml -o requirements-dev.txt
	$(VENV)-lock/bin/uv $(COMPILE) -c requirements-dev.txt --group build -o requirements-build.txt
	$(VENV)-lock/bin/uv $(COMPILE) -c requirements-dev.txt pyproject.toml -o requirements.txt
COMPILE = pip compile --quiet --universal --python-version 3.11 --generate-hashes --custom-compile-command "make lock"

sweep: $(VENV)/dev  ## every crash at every boundary, and every pair: minutes to hours
	$(BIN)/python -m pytest $(SWEEP) --long --timeout=0 --hypothesis-profile=explore $(ARGS)

test: $(VENV)/dev  ## run the tests; ARGS="-k name -x" narrows them
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Perdure needs a Python of 3.11 or later with venv; name one: make PYTHON=/path/to/python" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)

# what the package needs to run, and the checkout itself, editable
$(VENV)/run: $(VENV)/bin/python requirements.txt requirements-build.txt pyproject.toml
	$(PIP) install --require-hashes -r requirements.txt -r requirements-build.txt
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

# that, and what judges it
$(VENV)/dev: $(VENV)/run requirements-dev.txt
	$(PIP) install --require-hashes -r requirements-dev.txt
	@touch $@
