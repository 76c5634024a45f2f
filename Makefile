# Every target works from a fresh clone: the first one that needs .venv makes it.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
# Tests start hundreds of interpreters: without bytecode each would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

# Further arguments for the tool behind a target, e.g. make test ARGS="-k fence -x"
ARGS ?=
VENV := .venv
STAMP := $(VENV)/.stamp
BIN := $(VENV)/bin

# A virtual environment knows its own address: one that was moved or copied is made anew.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

$(STAMP): pyproject.toml requirements-dev.lock
	@PYTHON="$(PYTHON)" sh scripts/setup.sh $(VENV)
	@pwd -P >$@

# The demo needs a quarter of the packages. It has an environment of its own where there is none for development.
ifneq ($(or $(findstring --postgres,$(ARGS)),$(wildcard $(STAMP))),)
DEMO := $(VENV)
else
DEMO := .venv-demo
.venv-demo/.stamp: pyproject.toml deploy/requirements.lock
	@PYTHON="$(PYTHON)" sh scripts/setup.sh .venv-demo deploy/requirements.lock
	@pwd -P >$@
ifneq ($(shell cat .venv-demo/.stamp 2>/dev/null),$(CURDIR))
.PHONY: .venv-demo/.stamp
endif
endif

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

.PHONY: setup
setup: $(STAMP) ## Make .venv from requirements-dev.lock (PYTHON=... picks the interpreter)

.PHONY: demo
demo: $(DEMO)/.stamp ## Watch a pause, a takeover, a late commit and a killed leader, live (ARGS=--postgres for PostgreSQL)
	@exec $(DEMO)/bin/python examples/demo.py $(ARGS)

.PHONY: test
test: $(STAMP) ## Run the tests (ARGS="-k name" for some of them)
	@exec $(BIN)/python -m pytest --durations 20 --durations-min 5 $(ARGS)

.PHONY: check
check: $(STAMP) ## Run the static checks: format, lint, types, import contracts, generated code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/unasync.py --check
	$(BIN)/python scripts/picture.py --check

.PHONY: picture
picture: $(STAMP) ## Draw docs/explanation/architecture.svg from the imports
	@exec $(BIN)/python scripts/picture.py

.PHONY: bench
bench: $(STAMP) ## Run the benchmarks
	@exec $(BIN)/python -m bench $(ARGS)

.PHONY: chaos
chaos: $(STAMP) ## Break leases in every way known, and check that no promise is broken (ARGS="--minutes 30 --seed 7")
	@$(BIN)/python -m proof.bugs && exec $(BIN)/python -m proof.chaos $(ARGS)

.PHONY: torture
torture: $(STAMP) ## Torture locks: the storm, 10,000 timeouts and cancellations, every interrupt (an hour)
	@HOLDFAST_STORM_SECONDS=20 HOLDFAST_LOCK_RACES=10000 HOLDFAST_INTERRUPT_STRIDE=1 HOLDFAST_POOL_EXAMPLES=2000 \
	exec $(BIN)/python -m pytest tests/lock/test_storm.py tests/lock/internals/test_races.py tests/lock/internals/test_interrupts.py \
		tests/lock/internals/test_handlers.py tests/lock/internals/test_pool.py --timeout 1800 --durations 20 $(ARGS)

.PHONY: succession
succession: $(STAMP) ## Take the leader away a hundred times, and check that records stay true (ARGS="--times 300")
	@exec $(BIN)/python -m proof.succession $(ARGS)

.PHONY: attack
attack: $(STAMP) ## Attack a gateway, a driver and a database as hostile clients do (ARGS="--minutes 30 --seed 7")
	@exec $(BIN)/python -m proof.attack $(ARGS)

.PHONY: owners
owners: $(STAMP) ## Kill the owners of 400 operations, and reset a living one 200 times: no second attempt (ARGS="--times 20")
	@exec $(BIN)/python -m proof.owners $(ARGS)

.PHONY: cluster
cluster: $(STAMP) ## Take the leader of a Patroni cluster away, and check that no promise is broken (ARGS="--times 100")
	@exec $(BIN)/python -m proof.cluster $(ARGS)

.PHONY: storm
storm: $(STAMP) ## Run 400 operations in 16 processes that are killed and stopped: one effect, one result each (minutes)
	@HOLDFAST_STORM=1 HOLDFAST_INTERRUPT_STRIDE=1 exec $(BIN)/python -m pytest \
		tests/operations/test_storm.py tests/operations/internals/test_interrupted.py -n 0 -s --timeout 1800 $(ARGS)

.PHONY: schedules
schedules: $(STAMP) ## Kill, stop and cut off five processes that run schedules for a minute: one effect, or a reason, for each slot
	@HOLDFAST_SCHEDULE_SECONDS=60 exec $(BIN)/python -m pytest tests/schedules/test_storm.py -n 0 -s --timeout 600 $(ARGS)

.PHONY: lineage
lineage: $(STAMP) ## Break relay, sink and database for a minute: every event arrives, in order (ARGS="-k sqlite")
	@HOLDFAST_LINEAGE_SECONDS=60 exec $(BIN)/python -m pytest tests/lineage/internals/test_chaos.py -n 0 -s --timeout 600 $(ARGS)

.PHONY: prove
prove: $(STAMP) ## Run what only a real clock can show, and models, races, guard, slots, gates and commands at full length
	@$(BIN)/python -m pytest -m realtime -n 0 --timeout 600 $(ARGS)
	@HOLDFAST_TRIALS=10 exec $(BIN)/python -m pytest tests/lease/internals/test_races.py tests/lease/internals/test_lease_model.py tests/objects/test_object_model.py tests/database/test_many_callers.py \
		tests/database/internals/test_call_dispatcher.py tests/recipes/guard tests/recipes/slots tests/recipes/internals/test_gates.py tests/commands -rA --timeout 600 $(ARGS)

.PHONY: spec
spec: $(STAMP) ## Check the model of the lease with spin, the large instances too (minutes)
	@exec $(BIN)/python spec/check.py --large $(ARGS)

.PHONY: lock
lock: $(STAMP) ## Write the lock files anew from pyproject.toml (ARGS="--upgrade" for newer versions)
	@PATH="$$PWD/$(BIN):$$PATH"; command -v uv >/dev/null || $(BIN)/python -m pip install --quiet uv; \
	compile="uv pip compile pyproject.toml --universal --generate-hashes --no-header --no-annotate --no-emit-index-url --quiet"; \
	$$compile --all-extras --group dev --output-file requirements-dev.lock $(ARGS) && \
	exec $$compile --extra files --extra postgres --extra prometheus --extra server --group build --constraint requirements-dev.lock \
		--output-file deploy/requirements.lock
