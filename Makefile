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
#   make wheel                the source archive and the wheel, into dist
#   make check                formatting, lint, types, the rules of the house
#   make api                  docs/api.md from the docstrings; make test fails where the page is not what they say
#   make docs                 the site into build/site: documents, cookbook, reference, search; without another host
#   make bench                the benchmarks, and the goals at the end; ARGS="--only put,cycle --repeats 3" and so on
#   make plots RESULTS=path   what bench wrote with --json path (default: the last of bench/results), drawn into docs/plots
#   make pictures             the picture of the dashboard in docs, taken by a real browser
#   make bench-against REV=x  the hot paths against those of another commit, as ratios
#   make bench-spark          the benchmarks on Spark
#   make bench-jobs           jobs and the server, beside beanstalkd (which must be installed), huey and persist-queue
#   make bench-kestrel        the kestrel server beside the beanstalk server, beanstalkd and redis (if they are installed)
#   make bench-ship           a queue that is shipped to a folder and to SeaweedFS, beside one that is not
#   make bench-extras         what options cost that are not at their limits, beside a plain queue
#   make bench-arrow          a queue into pandas, polars and duckdb, beside the same rows in an Arrow file
#   make bench-outbox         the outbox beside procrastinate, huey and a hand-written loop; PostgreSQL must be installed
#   make demo-outbox          orders and mails in one transaction, with SIGKILLs and a proof; BIND=url of your database
#   make demo-ship            machines burn, queues go on from the store, and a proof; STORE=url of your bucket
#   make pipeline             a service, a Spark query on it, a lake and a report, with SIGKILLs and a proof; INPUT=path, STORE=url
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
WORKERS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) * 2)))
FILES = */_journal/packing.py,*/_journal/small_files.py,*/_journal/format.py,*/bodies.py,*/segment.py,*/checkpoint.py,*/_journal/journal.py,*/archive.py,*/retention.py,*/_journal/recovery.py,*/inbox/format.py,*/inbox/parts.py,*/inbox/ledger.py,*/inbox/ingest.py,*/inbox/publishing.py,*/_journal/moves.py,*/inbox/moves.py,*/_reading/burial.py,*/kestrelpy/letter.py,$(REPAIR_FILES),$(SHIP_FILES)
THEIR_TESTS = tests/unit/journal tests/unit/reading/test_burial.py tests/unit/inbox tests/unit/test_codecs.py tests/unit/test_full_disk.py \
	tests/unit/writing/test_durability.py tests/unit/writing/test_group_commit.py tests/crash/test_faults_injected.py \
	tests/regressions/test_found_by_crashes.py tests/regressions/test_found_by_fuzzing.py \
	$(addprefix tests/room/test_,kept_segments.py archive_room.py journal_limit.py lag.py) $(REPAIR_TESTS) $(SHIP_TESTS)
# What is left of damaged files, and what a repair makes of it; the room on the disk; dead letters as they are read.
REPAIR_FILES = */_journal/salvage.py,*/inspection/repair*.py,*/inspection/*_check.py,*/inspection/strange_files.py,*/work/doubts.py,*/archive_trimming.py,*/growth.py,*/disk_room.py,*/dead_queue.py
REPAIR_TESTS = $(addprefix tests/unit/inspection/test_,repair.py repair_edges.py strange_files.py) \
	$(addprefix tests/fuzz/test_,repair_bytes.py misplaced_files.py) tests/crash/test_repair_crashes.py tests/work/test_repair_jobs.py \
	tests/room/test_room_edges.py
# What is decided about bytes in a store, without the threads that carry it out. Left out of the tests: worlds that need
# a larger share to be of worth, and a server.
SHIP_FILES = */ship/framed.py,*/ship/slots.py,*/ship/manifest.py,*/ship/log.py,*/ship/ship_file.py,*/ship/identity.py,*/ship/history.py,*/ship/outside_reader.py,*/ship/reading.py,*/ship/garbage.py,*/ship/owner.py
SHIP_TESTS = $(addprefix tests/ship/test_,slots.py manifest.py log.py ship_file.py outside_reader.py history.py reading.py restore.py owner_steps.py \
	garbage.py remote.py store_inbox.py publishing.py shipped_inbox.py inbox_edges.py) tests/fuzz/test_corpus.py $(addprefix --deselect tests/ship/test_,garbage.py::test_worlds \
	garbage.py::test_a_planted_fault_is_found remote.py::test_on_a_real_store store_inbox.py::test_an_object_store)
BIN := $(VENV)/bin

.PHONY: help java postgresql demo demo-outbox demo-ship test test-all test-spark soak coverage compare wheel check api docs bench bench-against bench-spark bench-jobs bench-kestrel bench-outbox bench-ship bench-extras bench-arrow pipeline pictures plots micro clean

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

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs,spark]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-bench: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	@touch $@ $(VENV)/.installed

demo: $(VENV)/.installed
	@$(BIN)/python -m kestrelpy demo $(if $(INPUT),--input '$(INPUT)') $(ARGS)

demo-outbox: $(VENV)/.installed-outbox
	@$(BIN)/python -m kestrelpy.demo.outbox $(if $(BIND),--bind '$(BIND)') $(ARGS)

demo-ship: $(VENV)/.installed-spark $(if $(STORE),$(VENV)/.installed-ship) java
	@$(BIN)/python -m kestrelpy.demo.ship --spark $(if $(STORE),--store '$(STORE)') $(ARGS)

java:
	@java -version 2>&1 | grep -qE 'version "(17|21)' || \
	    { echo "Java 17 or 21 is missing: install openjdk-17-jre-headless (Debian, Ubuntu) or set PATH to one" >&2; exit 1; }

postgresql:
	@command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || .ci/install postgresql

# Where no bytecode may be written, each of the workers compiles all tests, and each of a thousand processes the library.
test test-all test-spark soak coverage: export PYTHONDONTWRITEBYTECODE =

test: $(VENV)/.installed-dev java postgresql
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --cases 1 $(ARGS)

test-all: $(VENV)/.installed-dev java postgresql
	KESTRELPY_SHARE=$(or $(KESTRELPY_SHARE),1) $(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

test-spark: $(VENV)/.installed-dev java
	KESTRELPY_LONG=1 $(BIN)/python -m pytest -n auto --dist worksteal -m slow_spark tests/spark tests/cli/test_demo_ship.py tests/test_docs.py tests/examples $(ARGS)

soak: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.soak --hours $(HOURS) $(ARGS)
	@$(BIN)/python -m tests.soak.ledger

coverage: $(VENV)/.installed-dev
	KESTRELPY_SHARE=0.02 $(BIN)/python -m coverage run --branch --source=kestrelpy -m pytest $(THEIR_TESTS)
	$(BIN)/python -m coverage report -m --include='$(FILES)' --fail-under=100

compare: $(VENV)/.installed-bench
	@$(BIN)/python -m bench.crash --write docs/comparison.md $(ARGS)

wheel: $(VENV)/.installed-dev
	$(BIN)/python -m build --no-isolation

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_tidy.py

api: $(VENV)/.installed-dev
	$(BIN)/python -m tests.support.api_page

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo 'To look at it: $(BIN)/python -m http.server -b 127.0.0.1 -d build/site'

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

bench-extras: $(VENV)/.installed-bench $(VENV)/.installed-dev
	@$(BIN)/python -m bench.extras $(ARGS)

bench-arrow: $(VENV)/.installed-bench $(VENV)/.installed-dev
	@$(BIN)/python -m bench.arrow $(ARGS)

bench-outbox: $(VENV)/.installed-bench
	@$(BIN)/python -m bench.outbox $(ARGS)

pipeline: $(VENV)/.installed-spark $(if $(STORE),$(VENV)/.installed-ship) java
	@$(BIN)/python -m kestrelpy.demo.pipeline $(if $(INPUT),--input '$(INPUT)') $(if $(STORE),--store '$(STORE)') $(ARGS)

plots: $(VENV)/.installed-bench
	@$(BIN)/python -m bench.plots '$(RESULTS)' --into docs/plots $(ARGS)

pictures: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.dashboard.picture docs/dashboard.png

micro: $(VENV)/.installed-bench
	@$(BIN)/python -m bench.micro $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
