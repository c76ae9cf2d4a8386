# make run | test | compare | soak | sim | lint | docs | clean. Needs Python 3.11 or newer and, at first,
# a network. Everything is installed into .venv from locked versions with hashes; stamp files there
# remember what was done, so that a second run does nothing and touches no network.

PYTHON ?= python3
UV ?= uv
ARGS ?=
WORKERS ?= auto
VENV := .venv
BIN := $(VENV)/bin
# One pip at a time, also with `make -j`, where there is flock (not on macOS).
# Python compiles what it imports; pip would compile all of it.
LOCKED := $(if $(shell command -v flock),flock $(VENV))
PIP_INSTALL := $(LOCKED) $(BIN)/python -m pip --disable-pip-version-check --no-input --quiet \
  install --no-compile
KERNELS := $(wildcard storage/kernels/*.py cleaner/engine/kernels/*.py cleaner/engine/kernels/*/*.py)
PIPELINE_KERNELS := $(wildcard pipeline/records/kernels.py pipeline/*/kernels/*.py)

# Somebody else's environment must not leak into ours. Without bytecode files every process that a
# test starts compiles the whole broker again.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV PYTHONDONTWRITEBYTECODE

.PHONY: help run test compare soak sim sim-schedule budgets lint docs site manifests lock clean
.DELETE_ON_ERROR:

help:
	@echo 'make run    set up and start the broker on 127.0.0.1:9092 (ARGS="--config FILE")'
	@echo 'make test   set up, with Spark, and run the tests in a process for each CPU and two more, at most four'
	@echo '            (ARGS="-k swap", ARGS="-m \"not spark\"", WORKERS=0 for one process)'
	@echo 'make compare  what our cleaner leaves beside what Apache Kafka leaves (ARGS="--seed N --cases N")'
	@echo 'make soak   ten minutes of load, kills and cleaning (ARGS="--minutes N --seed N")'
	@echo 'make sim    2,000 seeds of everything at once on one partition (SEEDS=N, SEED=N for its trace)'
	@echo 'make sim-schedule  the simulation of the order of cleans (SEEDS=0:100)'
	@echo 'make budgets  what the most expensive request of every API and version costs'
	@echo 'make lint   ruff, mypy, import-linter'
	@echo 'make docs   write docs/reference/configuration.md and the dashboards for Grafana'
	@echo 'make site   the documentation as a web site in build/site; a broken link fails'
	@echo 'make lock   resolve newer versions of the dependencies and lock them'
	@echo 'make clean  remove .venv and caches; data/ stays'

# exec: the broker takes the shell's place and gets SIGTERM and Ctrl-C itself.
run: $(VENV)/.warm
	@exec $(BIN)/varve serve $(ARGS)

test: $(VENV)/.installed-dev $(VENV)/.warm $(VENV)/.installed-pipeline $(VENV)/.warm-pipeline
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder $(ARGS)

compare: $(VENV)/.installed-dev $(VENV)/.warm
	@$(BIN)/python -m tests.compare $(ARGS)

soak: $(VENV)/.installed-dev $(VENV)/.warm
	@$(BIN)/python -m tests.soak $(ARGS)

sim: $(VENV)/.installed-dev $(VENV)/.warm
	@PYTHONHASHSEED=0 $(BIN)/python -m tests.sim $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),2000)) $(ARGS)
sim-schedule: $(VENV)/.installed-dev
	VARVE_SCHEDULE_SEEDS=$(or $(SEEDS),0:100) $(BIN)/python -m pytest -q tests/cleaner/scheduler/test_scheduling.py

budgets: $(VENV)/.installed-dev $(VENV)/.warm
	VARVE_ALL_BUDGETS=1 $(BIN)/python -m pytest -n $(WORKERS) tests/broker/network/test_budgets.py tests/broker/network/test_crowded_broker.py $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m protocol.stubs
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini tests bench
	$(BIN)/lint-imports

docs: $(VENV)/.installed
	$(BIN)/python -m config.reference > docs/reference/configuration.md
	$(BIN)/python deploy/grafana/build.py

# The variable silences an advertisement of the theme.
site: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Only for whoever changes the chart: needs helm.
manifests:
	helm template varve deploy/helm/varve --namespace varve --kube-version 1.33 > deploy/kubernetes/varve.yaml

# Only for whoever maintains the locks: needs uv.
lock:
	$(UV) pip compile -q --universal --python-version 3.11 --generate-hashes --no-header \
	  --no-annotate --upgrade -o requirements.lock pyproject.toml
	$(UV) pip compile -q --universal --python-version 3.11 --generate-hashes --no-header \
	  --no-annotate --upgrade -c requirements.lock --extra dev -o requirements-dev.lock pyproject.toml
	$(UV) pip compile -q --universal --python-version 3.11 --generate-hashes --no-header \
	  --no-annotate --upgrade -c requirements.lock -c requirements-dev.lock --extra docs \
	  -o requirements-docs.lock pyproject.toml
	$(UV) pip compile -q --universal --python-version 3.11 --generate-hashes --no-header \
	  --no-annotate --upgrade -c requirements.lock -c requirements-dev.lock --extra pipeline \
	  --extra connect --extra iceberg -o requirements-pipeline.lock pyproject.toml

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "varve needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1 || echo missing). Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || \
	  { echo "making $(VENV)" && $(PYTHON) -m venv --clear $(VENV); }
	@touch $@

$(VENV)/.installed: $(VENV)/.made requirements.lock requirements-build.lock pyproject.toml
	@echo "installing varve and the locked versions it runs on"
	@$(PIP_INSTALL) --require-hashes -r requirements-build.lock
	@$(PIP_INSTALL) --require-hashes -r requirements.lock
	@$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.lock
	@echo "installing the locked versions that tests and checks need"
	@$(PIP_INSTALL) --require-hashes -r requirements-dev.lock
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed requirements-docs.lock
	@echo "installing the locked versions that write the documentation site"
	@$(PIP_INSTALL) --require-hashes -r requirements-docs.lock
	@touch $@

$(VENV)/.warm: $(VENV)/.installed $(KERNELS)
	@$(BIN)/varve warmup
	@touch $@

# Spark comes as a source package of 450 MB, which needs nothing but setuptools, locked above.
$(VENV)/.installed-pipeline: $(VENV)/.installed requirements-pipeline.lock
	@echo "installing the locked versions that the pipeline needs: Spark takes a minute, and 500 MB"
	@$(PIP_INSTALL) --no-build-isolation --require-hashes -r requirements-pipeline.lock
	@touch $@

$(VENV)/.warm-pipeline: $(VENV)/.installed-pipeline $(VENV)/.warm $(PIPELINE_KERNELS)
	@echo "compiling the pipeline's kernels, keeping Spark's classes (the first time only)"
	@$(BIN)/varve pipeline warmup
	@touch $@
