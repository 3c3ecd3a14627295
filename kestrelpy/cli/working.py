"""The command ``jobs``: look at the jobs of a work queue, and kick, bury, delete, pause and clear.

Rules:
1. To look (``ls``, ``peek``) nothing is opened for writing and nothing is locked: it goes beside a running owner, and
   standard error says who that is and what can't be seen then.
2. To change something the queue is opened, which only one process may do. If another one has it open, nothing is
   changed, and the exit status is ``LOCKED``.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kestrelpy.cli import _common
from kestrelpy.cli._common import CommandError, counted, escaped, iso, printable
from kestrelpy.cli._owners import owner_of

if TYPE_CHECKING:
    from kestrelpy.cli._records import Commands
    from kestrelpy.work import JobsOutside, VisibleJob, WorkQueue

LOCKED = 10
"""The exit status if another process has the queue open, as of ``serve``."""
_HEAD_BYTES = 61
_SHOWN_BYTES = 60
_STATES = ("ready", "delayed", "buried")

_DESCRIPTION = f"""\
Look at the jobs of a work queue, or change them.

  ls      a line for each job; --tube and --state choose (this is the default)
  peek    whole jobs: those with the given ids, or the first --limit of --tube and --state
  kick    make buried or delayed jobs ready: those with the given ids, or up to --limit of --tube
  bury    set jobs aside, by their ids
  delete  delete jobs, by their ids
  pause   let no job of --tube be reserved for --seconds; 0 ends a pause
  clear   delete all jobs of --tube

ls and peek read the files and work beside a running owner; reserved jobs are shown as ready then. The others open the
queue, which one process at a time may do: if another one has it open, they change nothing.

exit status: 0 done; 1 no such job, or the command was refused; 2 wrong use; {LOCKED} another process has the queue
open.
"""


def add_commands(commands: Commands) -> None:
    """Add the parser of ``jobs``."""
    jobs = commands.add_parser(
        "jobs",
        help="look at the jobs of a work queue, and change them",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _common.add_queue(jobs)
    jobs.add_argument("action", metavar="ACTION", nargs="?", choices=tuple(_ACTIONS), default="ls", help="as above")
    jobs.add_argument("ids", metavar="ID", nargs="*", default=(), type=_common.item_id, help="ids of jobs")
    jobs.add_argument("--tube", metavar="TUBE", help="only this tube; for pause and clear the tube that is meant")
    jobs.add_argument("--state", choices=_STATES, help="only jobs in this state")
    jobs.add_argument("--limit", metavar="N", type=_common.positive, help="at most so many (peek and kick: 1)")
    jobs.add_argument("--seconds", metavar="S", type=_common.seconds, help="how long a pause lasts")
    jobs.add_argument("--json", action="store_true", help="one JSON object for each job, its body in base64")
    jobs.set_defaults(run=run_jobs)


def run_jobs(args: argparse.Namespace) -> int:
    """``kestrelpy jobs``."""
    _common.require_queue(args.directory, args.queue)
    if not _common.is_work_queue(args.directory, args.queue):
        raise CommandError(f"{args.queue} holds items, not jobs: it is no work queue")
    run, takes = _ACTIONS[args.action]
    given = {"ids": bool(args.ids), "tube": args.tube is not None, "state": args.state is not None}
    given |= {"limit": args.limit is not None, "seconds": args.seconds is not None, "json": args.json}
    for name, is_given in given.items():
        if is_given and name not in takes:
            text = "ids do not go" if name == "ids" else f"--{name} does not go"
            raise CommandError(f"{text} with {args.action}", status=2)
    return run(args)


# -- looking ---------------------------------------------------------------------------------------------------------


def _outside(args: argparse.Namespace, *, head_bytes: int | None) -> JobsOutside:
    """The jobs by the files. Says on standard error that an owner is at work, if one is known to be."""
    from kestrelpy.work import JobsOutside

    pid = owner_of(args.directory, args.queue)
    if pid is not None:
        who = f"process {pid}" if pid else "another process"
        sys.stderr.write(
            f"kestrelpy jobs: {who} has {args.queue} open: looking only; reserved jobs are shown as ready\n"
        )
    jobs = JobsOutside(args.directory, args.queue, head_bytes=head_bytes)
    jobs.look()
    return jobs


def _run_ls(args: argparse.Namespace) -> int:
    found = _outside(args, head_bytes=None if args.json else _HEAD_BYTES).jobs(tube=args.tube, state=args.state)
    chosen = list(itertools.islice(found, args.limit))
    if args.json:
        sys.stdout.write("".join(_json_line(job) for job in chosen))
    elif chosen:
        rows = [("id", "tube", "state", "priority", "added", "due", "tries", "key", "body")]
        for job in chosen:
            due = iso(job.due_ms) if job.due_ms else ""
            facts = (str(job.id), escaped(job.tube), job.state, str(job.priority), iso(job.added_ms), due)
            rows.append((*facts, f"{job.timeouts + job.releases:,}", escaped(job.key or ""), _cut(job.body)))
        sys.stdout.write(_common.table(rows, numbers=(0, 3, 6)))
    else:
        sys.stderr.write(f"kestrelpy jobs: no such jobs in {args.queue}\n")
    return 0 if chosen else 1


def _run_peek(args: argparse.Namespace) -> int:
    jobs = _outside(args, head_bytes=None)
    if args.ids:
        if args.tube is not None or args.state is not None or args.limit is not None:
            raise CommandError("which jobs? Pass ids, or --tube, --state and --limit", status=2)
        found = [(job_id, jobs.job(job_id)) for job_id in args.ids]
    else:
        chosen = itertools.islice(jobs.jobs(tube=args.tube, state=args.state), args.limit or 1)
        found = [(job.id, job) for job in chosen]
    there = [job for _, job in found if job is not None]
    if args.json:
        sys.stdout.write("".join(_json_line(job) for job in there))
    else:
        sys.stdout.write("\n".join(_page(job) for job in there))
    missing = [job_id for job_id, job in found if job is None]
    if missing:
        raise CommandError(f"there is no job {', '.join(map(str, missing))}")
    return 0 if there else 1


def _json_line(job: VisibleJob) -> str:
    fields: dict[str, Any] = job._asdict()
    fields["body"] = base64.b64encode(job.body).decode("ascii")
    return json.dumps(fields) + "\n"


def _page(job: VisibleJob) -> str:
    """All that is known of a job. Its body comes last, on a line of its own."""
    facts = [
        ("id", str(job.id)),
        ("tube", job.tube),
        ("state", job.state),
        ("priority", str(job.priority)),
        ("added", iso(job.added_ms)),
        *((("due", iso(job.due_ms)),) if job.due_ms else ()),
        ("ttr", f"{job.ttr:g} s"),
        ("tries", f"{job.timeouts:,} timeouts, {job.releases:,} releases, {job.buries:,} buries, {job.kicks:,} kicks"),
        *((("key", job.key),) if job.key is not None else ()),
        ("body", counted(job.body_bytes, "byte")),
    ]
    return "".join(f"{title:<10}{escaped(text)}\n" for title, text in facts) + f"    {printable(job.body)}\n"


def _cut(body: bytes) -> str:
    shown = printable(body)
    return shown if len(shown) <= _SHOWN_BYTES else shown[: _SHOWN_BYTES - 3] + "..."


# -- changing --------------------------------------------------------------------------------------------------------


def _opened(args: argparse.Namespace) -> WorkQueue:
    """Open the queue. Raises ``CommandError`` if another process has it open."""
    from kestrelpy.errors import QueueLocked
    from kestrelpy.work import JobsOutside

    try:
        return JobsOutside(args.directory, args.queue).open_queue()
    except QueueLocked as error:
        reason = f"{error}; nothing was changed: only ls and peek go beside it"
        raise CommandError(reason, status=LOCKED) from None


def _each(args: argparse.Namespace, do: Callable[[WorkQueue, int], object], done: str) -> int:
    """Do something to each job that is named. One that can't be changed does not keep the others from it."""
    from kestrelpy.work import JobNotFound, NotReserved

    if not args.ids:
        raise CommandError(f"which jobs? Pass their ids: kestrelpy jobs DIR QUEUE {args.action} ID ...", status=2)
    refused = []
    with _opened(args) as queue:
        for job_id in args.ids:
            try:
                do(queue, job_id)
            except (JobNotFound, NotReserved) as error:
                refused.append(str(error))
    print(f"{done} {counted(len(args.ids) - len(refused), 'job')}")
    if refused:
        raise CommandError("; ".join(refused))
    return 0


def _tube_of(args: argparse.Namespace) -> str:
    if args.tube is None:
        raise CommandError(f"which tube? {args.action} wants --tube", status=2)
    return str(args.tube)


def _run_kick(args: argparse.Namespace) -> int:
    if args.ids:
        if args.tube is not None or args.limit is not None:
            raise CommandError("which jobs? Pass ids, or --tube and --limit", status=2)
        return _each(args, lambda queue, job_id: queue.kick_job(job_id), "kicked")
    tube = _tube_of(args)
    with _opened(args) as queue:
        count = queue.kick(args.limit or 1, tube)
    print(f"kicked {counted(count, 'job')}")
    return 0 if count else 1


def _run_bury(args: argparse.Namespace) -> int:
    def bury(queue: WorkQueue, job_id: int) -> None:
        with queue.session() as session:
            session.reserve_job(job_id).bury()

    return _each(args, bury, "buried")


def _run_delete(args: argparse.Namespace) -> int:
    return _each(args, lambda queue, job_id: queue.delete(job_id), "deleted")


def _run_pause(args: argparse.Namespace) -> int:
    from kestrelpy.work import TubeNotFound

    tube = _tube_of(args)
    if args.seconds is None:
        raise CommandError("how long? pause wants --seconds; 0 ends a pause", status=2)
    with _opened(args) as queue:
        try:
            queue.pause_tube(tube, args.seconds)
        except TubeNotFound as error:
            raise CommandError(str(error)) from None
        except ValueError as error:  # too long
            raise CommandError(str(error), status=2) from None
    until = iso(int((time.time() + args.seconds) * 1000)) if args.seconds else ""
    print(f"paused {escaped(tube)} until {until}" if until else f"{escaped(tube)} is not paused any more")
    return 0


def _run_clear(args: argparse.Namespace) -> int:
    tube = _tube_of(args)
    with _opened(args) as queue:
        count = queue.clear(tube)
    print(f"deleted {counted(count, 'job')}")
    return 0


_ACTIONS: dict[str, tuple[Callable[[argparse.Namespace], int], tuple[str, ...]]] = {
    "ls": (_run_ls, ("tube", "state", "limit", "json")),
    "peek": (_run_peek, ("ids", "tube", "state", "limit", "json")),
    "kick": (_run_kick, ("ids", "tube", "limit")),
    "bury": (_run_bury, ("ids",)),
    "delete": (_run_delete, ("ids",)),
    "pause": (_run_pause, ("tube", "seconds")),
    "clear": (_run_clear, ("tube",)),
}
"""What is done, and the arguments that go with it."""
