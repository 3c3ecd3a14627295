# What there is to do here. Each target makes its own environment in .venv first, once; nothing else is needed than a
# Python 3.11 or newer with its venv module, and a package index that pip can reach. What runs on Spark needs Java 17.
#
#   make demo                 real lines through a durable queue, with SIGKILLs on the way and a proof at the end
#   make demo INPUT=path      the same with your own file or folder
#   make test                 each test with one of its cases, and a twentieth of each campaign; below four minutes
#   make test-all             all of it, as docs/guarantees.md publishes it; KESTRELPY_SHARE=10 for ten times as much
#   make test-spark           the tests on Spark that start drivers and executors, and kill them; docs/spark.md
#   make soak HOURS=8         all harnesses for hours, at low priority; what was seen goes into docs/ledger.json
#   make coverage             which branches of what reads and writes files the tests reach
#   make compare              other queues through the same kills and power cuts, into docs/comparison.md; for root
#   make check                formatting, lint, types, the rules of the house
#   make api                  docs/api.md from the docstrings; make test fails where the page is not what they say
#   make bench                the benchmarks, and the goals at the end; ARGS="--only put,cycle --repeats 3" and so on
#   make plots RESULTS=path   what bench wrote with --json path (default: the last of bench/results), drawn into docs/plots
#   make bench-against REV=x  the hot paths against those of another commit, as ratios
#   make bench-spark          the benchmarks on Spark
#   make bench-jobs           jobs and the server, beside beanstalkd (which must be installed), huey and persist-queue
#   make bench-kestrel        the kestrel server beside the beanstalk server, beanstalkd and redis (if they are installed)
#   make bench-ship           a queue that is shipped to a folder and to SeaweedFS, beside one that is not
#   make bench-outbox         the outbox beside procrastinate, huey and a hand-written loop; PostgreSQL must be installed
#   make demo-outbox          orders and mails in one transaction, with SIGKILLs and a proof; BIND=url of your database
#   make demo-ship            machines burn, queues go on from the store, and a proof; STORE=url of your bucket
#   make pipeline             a service, a Spark query on it, a lake and a report, with SIGKILLs and a proof; INPUT=path
#   make micro                single calls, measured with pyperf; ARGS="--fast" and so on
#   make clean                remove what these made

PYTHON ?= python3
VENV ?= .venv
INPUT ?=
BIND ?=
STORE ?=
RESULTS ?= $(lastword $(sort $(wildcard bench/results/*.json)))
ARGS ?=
REV ?= HEAD~1
HOURS ?= 1
WORKERS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) * 3 / 2)))
FILES = */_journal/packing.py,*/_journal/format.py,*/bodies.py,*/segment.py,*/checkpoint.py,*/_journal/journal.py,*/archive.py,*/_journal/recovery.py,*/inbox/format.py,*/inbox/parts.py,*/inbox/ledger.py,*/inbox/ingest.py,*/inbox/publishing.py
THEIR_TESTS = tests/unit/journal tests/unit/inbox tests/unit/test_codecs.py tests/unit/test_full_disk.py \
	tests/unit/writing/test_durability.py tests/unit/writing/test_group_commit.py tests/crash/test_faults_injected.py \
	tests/regressions/test_found_by_crashes.py tests/regressions/test_found_by_fuzzing.py
BIN := $(VENV)/bin

.PHONY: help java postgresql demo demo-outbox demo-ship test test-all test-spark soak coverage compare check api bench bench-against bench-spark bench-jobs bench-kestrel bench-outbox bench-ship pipeline plots micro clean

help:
	@sed -n 's/^#   //p' Makefile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is too old, or is not there: Python 3.11 or newer is needed (make PYTHON=python3.12 ...)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,spark]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-outbox: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[outbox,postgres]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-ship: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[ship]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-spark: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[spark]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-bench: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	@touch $@ $(VENV)/.installed

demo: $(VENV)/.installed
	@$(BIN)/python -m kestrelpy demo $(if $(INPUT),--input '$(INPUT)') $(ARGS)

demo-outbox: $(VENV)/.installed-outbox
	@$(BIN)/python -m kestrelpy.demo.outbox $(if $(BIND),--bind '$(BIND)') $(ARGS)

demo-ship: $(VENV)/.installed$(if $(STORE),-ship)
	@$(BIN)/python -m kestrelpy.demo.ship $(if $(STORE),--store '$(STORE)') $(ARGS)

java:
	@java -version 2>&1 | grep -qE 'version "(17|21)' || \
	    { echo "Java 17 or 21 is missing: install openjdk-17-jre-headless (Debian, Ubuntu) or set PATH to one" >&2; exit 1; }

postgresql:
	@command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || .ci/install postgresql

test: $(VENV)/.installed-dev java postgresql
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --cases 1 $(ARGS)

test-all: $(VENV)/.installed-dev java postgresql
	KESTRELPY_SHARE=$(or $(KESTRELPY_SHARE),1) $(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

test-spark: $(VENV)/.installed-dev java
	KESTRELPY_LONG=1 $(BIN)/python -m pytest -n auto --dist worksteal -m slow_spark tests/spark tests/test_docs.py $(ARGS)

soak: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.soak --hours $(HOURS) $(ARGS)
	@$(BIN)/python -m tests.soak.ledger

coverage: $(VENV)/.installed-dev
	KESTRELPY_SHARE=0.02 $(BIN)/python -m coverage run --branch --source=kestrelpy -m pytest $(THEIR_TESTS)
	$(BIN)/python -m coverage report -m --include='$(FILES)' --fail-under=100

compare: $(VENV)/.installed-bench
	@$(BIN)/python -m bench.crash --write docs/comparison.md $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_tidy.py

api: $(VENV)/.installed-dev
	$(BIN)/python -m tests.support.api_page

bench: $(VENV)/.installed-bench
	@$(BIN)/python -m bench $(ARGS)

bench-against: $(VENV)/.installed
	@$(BIN)/python -m bench.against $(REV) $(ARGS)

bench-spark: $(VENV)/.installed-bench $(VENV)/.installed-spark java
	@$(BIN)/python -m bench --spark $(ARGS)

bench-jobs: $(VENV)/.installed-bench
	@$(BIN)/python -m bench.beanstalk $(ARGS)

bench-kestrel: $(VENV)/.installed-bench
	@$(BIN)/python -m bench.kestrel $(ARGS)

bench-ship: $(VENV)/.installed-bench $(VENV)/.installed-dev
	@$(BIN)/python -m bench.ship $(ARGS)

bench-outbox: $(VENV)/.installed-bench
	@$(BIN)/python -m bench.outbox $(ARGS)

pipeline: $(VENV)/.installed-spark java
	@$(BIN)/python -m kestrelpy.demo.pipeline $(if $(INPUT),--input '$(INPUT)') $(ARGS)

plots: $(VENV)/.installed-bench
	@$(BIN)/python -m bench.plots '$(RESULTS)' --into docs/plots $(ARGS)

micro: $(VENV)/.installed-bench
	@$(BIN)/python -m bench.micro $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
