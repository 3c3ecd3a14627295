"""``outbox``: looks at the jobs of an outbox in a database, mends them, and runs them.

The command line knows the table and not the application: no handlers, no options of queues, no codecs. Only ``outbox
run`` imports the application, and so has them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kestrelpy.cli import _common as common
from kestrelpy.cli import _database, _jobs
from kestrelpy.cli._common import CommandError, escaped
from kestrelpy.errors import InvalidName

if TYPE_CHECKING:
    from kestrelpy.cli._records import Commands
    from kestrelpy.outbox import Health, Job, Outbox

__all__ = ["add_commands"]

STATUSES = ("ready", "waiting", "running", "error", "done", "dead", "cancelled")
ENDED = ("error", "dead", "cancelled", "done")
SPANS = ("total", "wait", "run")
TIMES = ("min", "avg", "p50", "p90", "p95", "p99", "max")
_MOST_ID = (1 << 63) - 1
_SECONDS_OF = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DESCRIPTION = f"""\
Look at the jobs of an outbox in a database, and mend them. The database is --bind, or the variable
{_database.VARIABLE}; a URL with a password is better kept there, where no list of processes shows it.
"""
_EPILOG = """\
exit status: 0 done; 1 nothing was there, the outbox is unhealthy, or the command was refused; 2 wrong use.

  kestrelpy outbox init --bind sqlite:///jobs.db
  kestrelpy outbox stats --bind sqlite:///jobs.db
  kestrelpy outbox errors mail --json --bind sqlite:///jobs.db
  kestrelpy outbox retry --queue mail --all --bind sqlite:///jobs.db
  kestrelpy outbox run shop.jobs:outbox --threads 8
"""


# -- parsers ---------------------------------------------------------------------------------------------------------


def add_commands(commands: Commands) -> None:
    """Add ``outbox`` and its commands to the parser."""
    how = argparse.RawDescriptionHelpFormatter
    outbox = commands.add_parser(
        "outbox",
        help="look at the jobs of an outbox in a database, and mend them",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=how,
    )
    inner = outbox.add_subparsers(title="commands", metavar="COMMAND", dest="outbox_command", required=True)
    _add_tables(inner)
    _add_looking(inner)
    _add_mending(inner)
    _add_running(inner)


def _command(commands: Any, name: str, run: Any, text: str, more: str = "", *, has_json: bool = False) -> Any:
    """A parser with the options that all have."""
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}. {more}".strip())
    parser.set_defaults(run=run)
    if has_json:
        parser.add_argument("--json", action="store_true", help="print JSON objects, one on each line")
    _database.add_database(parser)
    return parser


def _add_tables(commands: Any) -> None:
    _command(commands, "init", run_init, "create the tables that are missing", "A file of SQLite is made, too.")
    sql = _command(
        commands, "sql", run_sql, "print the SQL that creates the tables", "For tools of migration. Opens no database."
    )
    sql.add_argument(
        "--dialect",
        choices=("postgresql", "sqlite"),
        help="whose SQL (default: that of the database, or postgresql where none is given)",
    )


def _add_looking(commands: Any) -> None:
    stats = _command(commands, "stats", run_stats, "count the jobs of each queue in each status", has_json=True)
    _add_queue(stats)
    kind = stats.add_mutually_exclusive_group()
    kind.add_argument("--retries", action="store_true", help="show how often jobs had to be run again instead")
    kind.add_argument(
        "--times",
        metavar="SPAN",
        choices=SPANS,
        help="show how long done jobs took instead: total (put to done), wait (due to start) or run, in seconds",
    )
    stats.add_argument(
        "--age-days",
        metavar="DAYS",
        type=common.seconds,
        default=30.0,
        help="with --retries and --times: only jobs that were put in the last DAYS days (default: 30)",
    )

    jobs = _command(commands, "jobs", run_jobs, "list jobs by their id", has_json=True)
    _add_queue(jobs)
    jobs.add_argument("--status", choices=STATUSES, metavar="STATUS", help="only those in STATUS")
    jobs.add_argument("--group", metavar="GROUP", help="only those of this group")
    _add_limit(jobs)
    jobs.add_argument("--after-id", metavar="ID", type=_job_id, default=0, help="only jobs with a larger id")

    errors = _command(
        commands, "errors", run_errors, "list jobs in error and dead ones, the oldest failure first", has_json=True
    )
    _add_queue(errors)
    _add_limit(errors)

    show = _command(commands, "show", run_show, "show all of a job: its payload and its last error", has_json=True)
    show.add_argument("id", metavar="ID", nargs="?", type=_job_id, help="its id; or use --queue and --key")
    _add_queue_and_key(show)

    health = _command(
        commands,
        "health",
        run_health,
        "say whether the outbox is healthy",
        "The exit status is 1 if it is not, or if the database does not answer. Handlers that are slow are seen by "
        "their own process only.",
        has_json=True,
    )
    _add_error_age(health)

    top = _command(
        commands, "top", run_top, "show a live table of the queues", "Ctrl-C ends it. Needs the extra [cli] (rich)."
    )
    top.add_argument("--once", action="store_true", help="show it once; also where standard output is no terminal")
    top.add_argument("--interval", metavar="S", type=_interval, default=1.0, help="seconds between looks (default: 1)")
    _add_error_age(top)


def _add_mending(commands: Any) -> None:
    retry = _command(
        commands,
        "retry",
        run_retry,
        "make jobs ready now that have failed or ended",
        "Their tries begin at 0. A job that is ready, waiting or running is left alone.",
        has_json=True,
    )
    retry.add_argument("ids", metavar="ID", nargs="*", type=_job_id, help="ids; or use --queue with --key or --all")
    _add_queue_and_key(retry)
    retry.add_argument("--all", action="store_true", help="with --queue: all of its jobs in --status")
    retry.add_argument(
        "--status", choices=ENDED, metavar="STATUS", help="with --all: STATUS of the jobs (default: dead)"
    )

    cancel = _command(
        commands,
        "cancel",
        run_cancel,
        "cancel jobs that are ready, waiting, in error or dead",
        "A dead job that is cancelled is dealt with: it is unhealthy no more.",
        has_json=True,
    )
    cancel.add_argument("ids", metavar="ID", nargs="*", type=_job_id, help="ids; or use --queue and --key")
    _add_queue_and_key(cancel)

    prune = _command(
        commands,
        "prune",
        run_prune,
        "delete jobs that ended long ago",
        "Never one that another job waits for. What the application says by keep_done and keep_dead does not matter.",
        has_json=True,
    )
    prune.add_argument("--queue", metavar="QUEUE", help="only of this queue (default: of all)")
    prune.add_argument(
        "--older-than",
        metavar="TIME",
        type=_duration,
        default=7 * 86_400.0,
        help="only jobs that ended so long ago: 90s, 30m, 12h, 7d, 2w (default: 7d)",
    )
    prune.add_argument(
        "--status",
        choices=("done", "dead"),
        action="append",
        help="done (with the cancelled ones) or dead; may be repeated (default: done)",
    )

    for name, run, text in (
        ("pause", run_pause, "let no process claim jobs of these queues"),
        ("resume", run_resume, "end a pause"),
    ):
        parser = _command(commands, name, run, text, "All processes see it by their next claim.")
        parser.add_argument("queues", metavar="QUEUE", nargs="+", help="the queue's name")


def _add_running(commands: Any) -> None:
    run = _command(
        commands,
        "run",
        run_run,
        "run the jobs of an application until SIGTERM or Ctrl-C",
        "Handlers that run then are waited for; a second signal ends the process now. --bind is for an outbox that the "
        "application has not bound; --table and --schema are the application's.",
    )
    run.add_argument("target", metavar="MODULE:OUTBOX", help="where the application has its outbox: shop.jobs:outbox")
    run.add_argument(
        "--threads", metavar="N", type=common.positive, default=4, help="threads for handlers (default: 4)"
    )
    run.add_argument("--queue", metavar="QUEUE", action="append", help="only this queue; may be repeated")


def _add_queue(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("queue", metavar="QUEUE", nargs="?", help="only this queue")


def _add_queue_and_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--queue", metavar="QUEUE", help="the queue of the job")
    parser.add_argument("--key", metavar="KEY", help="with --queue: the job's key")


def _add_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit", metavar="N", type=common.positive, default=100, help="at most N jobs (default: 100)")


def _add_error_age(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--error-age",
        metavar="S",
        type=common.seconds,
        default=900.0,
        help="a job that failed first S seconds ago is unhealthy (default: 900)",
    )


def _job_id(text: str) -> int:
    number = common.item_id(text)
    if number > _MOST_ID:
        raise argparse.ArgumentTypeError(f"there is no id {number}")
    return number


def _duration(text: str) -> float:
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)([smhdw]?)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be a time such as 90s, 30m, 12h, 7d or 2w, not {text!r}")
    return common.seconds(found[1]) * _SECONDS_OF[found[2]]


def _interval(text: str) -> float:
    number = common.seconds(text)
    if number < 0.1:
        raise argparse.ArgumentTypeError(f"must be at least 0.1, not {text}")
    return number


# -- tables ----------------------------------------------------------------------------------------------------------


def run_init(args: argparse.Namespace) -> int:
    """``kestrelpy outbox init``."""
    with _database.opened(args, is_new=True) as outbox:
        outbox.create_tables()
    return 0


def run_sql(args: argparse.Namespace) -> int:
    """``kestrelpy outbox sql``."""
    from kestrelpy.outbox import Outbox

    with _database.said_in_one_line(None):
        from sqlalchemy.dialects import postgresql, sqlite
        from sqlalchemy.schema import CreateIndex, CreateTable

        name = args.dialect or _dialect_of(args)
        dialect = {"postgresql": postgresql, "sqlite": sqlite}[name].dialect()
        metadata = Outbox(table=args.table, schema=args.schema).metadata
        for made in metadata.sorted_tables:
            _print_statement(CreateTable(made).compile(dialect=dialect))
            for index in sorted(made.indexes, key=lambda index: str(index.name)):
                _print_statement(CreateIndex(index).compile(dialect=dialect))
        version = next(made for made in metadata.sorted_tables if made.name == f"{args.table}_version")
        insert = version.insert().values(version=metadata.info["version"])
        _print_statement(insert.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))
    return 0


def _dialect_of(args: argparse.Namespace) -> str:
    """Of the database, if one is given that can hold an outbox."""
    if not (args.bind or os.environ.get(_database.VARIABLE)):
        return "postgresql"
    name = _database.url_of(args).get_backend_name()
    if name not in ("postgresql", "sqlite"):
        raise CommandError(f"--dialect: there is no SQL for {escaped(name)}", status=2)
    return name


def _print_statement(compiled: object) -> None:
    lines = (line.rstrip() for line in str(compiled).strip().splitlines())
    print("\n".join(lines) + ";\n")


# -- looking ---------------------------------------------------------------------------------------------------------


def run_stats(args: argparse.Namespace) -> int:
    """``kestrelpy outbox stats``."""
    with _database.opened(args) as outbox:
        if args.retries:
            return _print_values(outbox.retry_stats(age_days=args.age_days, queue=args.queue), args)
        if args.times:
            return _print_values(outbox.processing_times(age_days=args.age_days, queue=args.queue, of=args.times), args)
        counts = outbox.stats(args.queue)
        paused = _database.paused_queues(outbox)
    if args.json:
        for one in counts:
            print(json.dumps(dataclasses.asdict(one)))
        return 0 if counts else 1
    by_queue: dict[str, dict[str, int]] = {}
    for one in counts:
        by_queue.setdefault(one.queue, {})[one.status] = one.count
    rows: list[tuple[str, ...]] = [("queue", *STATUSES, "")]
    for queue, mine in by_queue.items():
        figures = (f"{mine.get(status, 0):,}" for status in STATUSES)
        rows.append((escaped(queue), *figures, "paused" if queue in paused else ""))
    if by_queue:
        sys.stdout.write(common.table(rows, numbers=range(1, len(STATUSES) + 1)))
    return 0 if counts else 1


def _print_values(values: dict[str, Any], args: argparse.Namespace) -> int:
    """A line, or a JSON object, for each queue and its value."""
    found = {queue: dataclasses.asdict(value) for queue, value in values.items()}
    if args.json:
        for queue, fields in found.items():
            print(json.dumps({"queue": queue, **fields}))
    elif found:
        names = list(next(iter(found.values())))
        rows = [("queue", *(name.replace("_", " ") for name in names))]
        rows += [(escaped(queue), *map(_figure, fields.values())) for queue, fields in found.items()]
        sys.stdout.write(common.table(rows, numbers=range(1, len(names) + 1)))
    return 0 if found else 1


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def run_jobs(args: argparse.Namespace) -> int:
    """``kestrelpy outbox jobs``."""
    with _database.opened(args) as outbox:
        found = outbox.jobs(args.queue, status=args.status, group=args.group, limit=args.limit, after_id=args.after_id)
    return _print_jobs(found, args, _jobs.jobs_table)


def run_errors(args: argparse.Namespace) -> int:
    """``kestrelpy outbox errors``."""
    with _database.opened(args) as outbox:
        found = outbox.errors(args.queue, limit=args.limit)
    return _print_jobs(found, args, _jobs.errors_table)


def _print_jobs(found: list[Job], args: argparse.Namespace, as_table: Any) -> int:
    if args.json:
        for job in found:
            print(_jobs.json_line(job))
    elif found:
        sys.stdout.write(as_table(found))
    return 0 if found else 1


def run_show(args: argparse.Namespace) -> int:
    """``kestrelpy outbox show``."""
    _check_selection(args, [] if args.id is None else [args.id])
    with _database.opened(args) as outbox:
        job = outbox.find(args.queue, args.key) if args.id is None else outbox.get(args.id)
    sys.stdout.write(_jobs.json_line(job) + "\n" if args.json else _jobs.page(job))
    return 0


def run_health(args: argparse.Namespace) -> int:
    """``kestrelpy outbox health``."""
    with _database.opened(args, healthy_error_age=args.error_age) as outbox:
        health = _without_passwords(outbox.health(), args)
    if args.json:
        print(json.dumps(dataclasses.asdict(health)))
        return 0 if health.healthy else 1
    print("healthy" if health.healthy else "UNHEALTHY")
    for reason in health.reasons:
        print(f"  {reason}")
    age = health.oldest_ready_age
    print(f"jobs that wait for a dead or cancelled one: {health.waiting_on_dead:,}")
    print(f"the oldest ready job has been due for: {'- (there is none)' if age is None else f'{age:,.3f} s'}")
    return 0 if health.healthy else 1


def _without_passwords(health: Health, args: argparse.Namespace) -> Health:
    url = _database.url_of(args)
    return dataclasses.replace(
        health, reasons=tuple(_database.without_password(reason, url) for reason in health.reasons)
    )


def run_top(args: argparse.Namespace) -> int:
    """``kestrelpy outbox top``."""
    try:
        import rich  # noqa: F401 - it is the extra
    except ImportError:
        raise CommandError("this needs the extra [cli]: pip install 'kestrelpy[cli]'", status=2) from None
    from kestrelpy.cli import _top

    url = _database.url_of(args)
    with _database.opened(args, healthy_error_age=args.error_age) as outbox:
        return _top.show(_top.Looker(outbox, args.table, url), once=args.once, interval=args.interval)


# -- mending ---------------------------------------------------------------------------------------------------------


def _check_selection(args: argparse.Namespace, ids: list[int]) -> None:
    """Raise ``CommandError`` unless ids are given, or a queue and a key, and not both."""
    by_key = args.queue is not None and args.key is not None
    if bool(ids) == by_key or (ids and (args.queue is not None or args.key is not None)):
        raise CommandError("which job? Pass its id, or --queue and --key", status=2)


def run_retry(args: argparse.Namespace) -> int:
    """``kestrelpy outbox retry``."""
    if args.all:
        if args.ids or args.key is not None or args.queue is None:
            raise CommandError("--all needs --queue, and neither ids nor --key", status=2)
        with _database.opened(args) as outbox:
            count = outbox.retry_all(args.queue, args.status or "dead")
        return _print_count(count, "retried", args)
    if args.status is not None:
        raise CommandError("--status is for --all", status=2)
    _check_selection(args, args.ids)
    with _database.opened(args) as outbox:
        return _each(args, _chosen(outbox, args), outbox, outbox.retry, "retried")


def run_cancel(args: argparse.Namespace) -> int:
    """``kestrelpy outbox cancel``."""
    _check_selection(args, args.ids)
    with _database.opened(args) as outbox:
        return _each(args, _chosen(outbox, args), outbox, outbox.cancel, "cancelled")


def _chosen(outbox: Outbox, args: argparse.Namespace) -> Iterable[int]:
    return args.ids or [outbox.find(args.queue, args.key).id]


def _each(args: argparse.Namespace, ids: Iterable[int], outbox: Outbox, change: Any, word: str) -> int:
    """Change each job, and say on standard error which could not be changed. Each is a transaction of its own."""
    from kestrelpy.outbox import JobNotFound

    status = 0
    for job_id in ids:
        try:
            is_changed = change(job_id)
            refused = "" if is_changed else f"job {job_id} is {escaped(outbox.get(job_id).status)}: not {word}"
        except JobNotFound as missing:
            is_changed, refused = False, str(missing)
        if args.json:
            print(json.dumps({"id": job_id, word: is_changed}))
        if refused:
            status = 1
            with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error is closed
                sys.stderr.write(f"kestrelpy outbox: {refused}\n")
    return status


def run_prune(args: argparse.Namespace) -> int:
    """``kestrelpy outbox prune``."""
    statuses = set(args.status or ["done"])
    keep_done = args.older_than if "done" in statuses else None
    keep_dead = args.older_than if "dead" in statuses else None
    status = 0
    with _database.opened(args, keep_done=keep_done, keep_dead=keep_dead) as outbox:
        for name in sorted({one.queue for one in outbox.stats(args.queue)}):
            try:
                outbox.queue(name)
            except InvalidName:  # a row that no outbox has put
                status = 1
                sys.stderr.write(f"kestrelpy outbox: {escaped(name)}: no name of a queue, left alone\n")
        count = outbox.prune()
    return _print_count(count, "deleted", args) or status


def _print_count(count: int, word: str, args: argparse.Namespace) -> int:
    print(json.dumps({word: count}) if args.json else f"{common.counted(count, 'job')} {word}")
    return 0


def run_pause(args: argparse.Namespace) -> int:
    """``kestrelpy outbox pause``."""
    with _database.opened(args) as outbox:
        for queue in args.queues:
            outbox.pause(queue)
    return 0


def run_resume(args: argparse.Namespace) -> int:
    """``kestrelpy outbox resume``."""
    with _database.opened(args) as outbox:
        for queue in args.queues:
            outbox.resume(queue)
    return 0


# -- running ---------------------------------------------------------------------------------------------------------


def run_run(args: argparse.Namespace) -> int:
    """``kestrelpy outbox run``."""
    outbox = _imported(args.target)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")  # if the application has none
    url = None
    with _database.said_in_one_line(None):
        if args.bind:
            url = _database.parsed(args.bind, "--bind")
            outbox.bind(url)
        elif os.environ.get(_database.VARIABLE):
            url = _bind_if_unbound(outbox)
    with _database.said_in_one_line(url):
        outbox.run(args.queue, threads=args.threads)
    return 0


def _bind_if_unbound(outbox: Outbox) -> Any:
    from kestrelpy.outbox import OutboxError

    url = _database.parsed(os.environ[_database.VARIABLE], _database.VARIABLE)
    try:
        outbox.bind(url)
    except OutboxError as error:
        if type(error) is not OutboxError:  # it says that the outbox is bound: the application decides
            raise
        return None
    return url


def _imported(target: str) -> Outbox:
    """The outbox at ``MODULE:OUTBOX``. Raises ``CommandError``, also for what the module raises."""
    from importlib import import_module

    from kestrelpy.outbox import Outbox

    module_name, colon, path = target.partition(":")
    if not (module_name and colon and path):
        raise CommandError(f"MODULE:OUTBOX, such as shop.jobs:outbox, not {escaped(target)}", status=2)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as python -m has it
    try:
        found: Any = import_module(module_name)
    except Exception as error:
        if os.environ.get("KESTRELPY_TRACEBACK"):
            raise
        text = _database.without_password(f"{type(error).__name__}: {error}", None)
        raise CommandError(f"{escaped(module_name)} can't be imported: {text}") from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise CommandError(f"{escaped(module_name)} has no {escaped(path)}") from None
    if not isinstance(found, Outbox):
        raise CommandError(f"{escaped(target)} is no Outbox, but {escaped(type(found).__name__)}")
    return found
