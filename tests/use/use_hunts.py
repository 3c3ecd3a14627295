"""How the explorer finds each planted defect: what a seed must have (``lean``), and what is said then.

A hunt is the explorer as it always is, with the swarm leaning to where the defect is; so a hunt takes a part of a
second where the whole would take minutes.

    python -m tests.use.use_hunts [NAME...]        hunt for these, or for all
"""

from __future__ import annotations

import importlib
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from tests.interleavings.scheduler import BrokenSchedule
from tests.use import use_explorer, use_scenes_threads
from tests.use.planting import DEFECTS
from tests.use.use_explorer import Failure, Watchdog, draw, play


@dataclass(frozen=True)
class Hunt:
    """``lean``: options, operations and faults. ``says``: a regular expression of what must be said. ``first_seed``:
    later than 1 where it is found there within ``steps`` from 1 on, and the way there takes its time.
    """

    lean: tuple[str, ...]
    says: str
    steps: int = 40_000
    first_seed: int = 1
    schedules: int = 0
    """So many schedules of ``use_scenes_threads``, in place of steps: for what only threads can show."""


HUNTS: dict[str, Hunt] = {
    "C1": Hunt(("open_reader", "kill", "queue_get"), "the places of the readers"),
    "C3": Hunt(
        ("open_reader", "seek", "churn", "storm", "meanwhile", "large batches"),
        "Corrupt|FileNotFound|passed|needed",
    ),
    "C4": Hunt(("drop oldest", "limits", "EMFILE", "EIO", "fault", "small memory", "seek"), "has raised|retur|Error"),
    "C14": Hunt(("publish", "take_in"), "has become item|a batch has become"),
    "C2": Hunt(("always", "reentrant", "put_future", "get_future", "hooks"), "Hang"),
    "C6": Hunt(("limits", "open_reader", "tiny limits"), "which there is not|are accepted|is refused by"),
    "C17b": Hunt(("hooks", "raising", "severe"), "comes out of"),
    "C21": Hunt(("chain",), "too early|Recursion|wait in"),
    "C7": Hunt(("erase", "open_reader", "churn"), "belongs to another|NoDefault|not dense|needed|missing|places"),
    "C9": Hunt(("aput", "cancel_task", "block", "limits", "tiny limits"), "threads|has raised|refused"),
    "C10": Hunt(("sync", "fault", "EIO", "mend"), "still holds on"),
    "C15": Hunt(("scan", "put_many", "large batches"), "scan has listed"),
    "C18b": Hunt(("stop", "put_many", "commit_many"), "a process that is stopped"),
    "C20": Hunt(("second queue", "publish", "open", "advance"), "a batch waits for"),
    "C22": Hunt(("archive", "archive is the folder", "put_many", "commit_many"), "journal and archive"),
    "C27": Hunt(("limits", "block"), "for ever|anywhere|deadlock", first_seed=17, schedules=60),
    "C28": Hunt(("repeat",), "blocks of memory"),
    "C28b": Hunt((), "timers are left"),
    "C29": Hunt(("inspect", "meanwhile", "churn", "storm", "open"), "Figures|inspect|FileNotFound"),
    "H6": Hunt(("aput", "cancel_task", "block", "limits", "tiny limits"), "threads|has raised|refused"),
    "H7": Hunt(("aput", "cancel_task", "block", "limits", "tiny limits"), "threads"),
    "C26": Hunt(("odd options",), "Overflow|ValueError|TypeError|of nan|Recursion|of inf"),
    "H8": Hunt(("repeat",), "blocks of memory"),
    "house-6": Hunt(("odd_commit",), "was settled"),
    "H9": Hunt(("bytes limit", "put_many", "large batches"), "before the last"),
    "P3": Hunt(("publish",), "and its queue takes"),
    "U1": Hunt(("jobs", "full", "fill", "job_settle", "job_change", "kill", "never"), "is seen again"),
    "U2": Hunt(("aput", "cancel_task", "block", "limits", "tiny limits"), "threads"),
    "bug 1": Hunt(("memory_queue",), "queue in memory"),
    "bug 2": Hunt(("open_reader", "put_many", "large batches"), "open_reader has listed"),
    "C5": Hunt(("threads", "beside"), "is not on disk", schedules=60),
    "C17": Hunt(("severe", "timeout hook"), "maintenance thread|a sync failed|SystemExit", schedules=60),
    "C18": Hunt(("sleeping", "beside"), "is not on disk", schedules=60),
    "C19": Hunt(("expired hook", "raising", "limits", "block"), "was called|anywhere", schedules=60),
    "C24": Hunt(("drop oldest", "bytes limit"), "says that it has"),
    "H4": Hunt(("hooks", "reentrant", "expiry", "limits", "discard_expired"), "which a hook has"),
    "H5": Hunt(("hooks", "reentrant", "expiry", "abort", "discard_expired"), "which a hook has|AssertionError"),
    "U9": Hunt(("publish",), "was refused|has become item"),
    "H10": Hunt(("jobs", "job_task"), "jobs are reserved|is ready"),
    "U3": Hunt(("jobs", "job_kind"), "is opened as what it is not"),
    "U3 (mark)": Hunt(("jobs", "job_kind", "job_close"), "is opened as what it is not"),
    "U5": Hunt(("jobs",), "TypeError"),
    "U7": Hunt(("jobs", "job_with"), "says nothing, and it was over"),
    "U13": Hunt(("jobs", "job_session_end"), "sessions; somebody has"),
    "U14": Hunt(("jobs", "many jobs", "job_late", "job_put_many"), "is over"),
    "U16": Hunt(("jobs", "job_future"), "is not a timeout"),
    "E4": Hunt(("join", "queue_get"), "says that all is done"),
    "E5": Hunt(("publish", "open", "close"), "no round of maintenance"),
    "jobs delay": Hunt(("jobs", "job_settle", "job_reserve"), "early"),
    "jobs codec": Hunt(("jobs", "job_settle", "job_reserve"), "nobody has put"),
    "E1": Hunt(
        ("open_reader", "erase", "open", "scan", "meanwhile", "storm"), "Corrupt|scan|begins at|verify|FileNotFound"
    ),
    "E2": Hunt(("jobs", "sync", "fault", "advance", "job_reserve"), "after an opening"),
    "E3": Hunt(("EIO", "fault", "get_future", "small memory", "expiry"), "wait in"),
    "U9 lock": Hunt(("visit", "queue_names"), "queue_names"),
    "room journal": Hunt(("journal limit", "put_many", "large batches"), "and the journal has"),
    "room lag": Hunt(("lag refuses", "reader", "put"), "bytes behind"),
    "room gate": Hunt(("lag refuses", "reader", "put", "commit"), "bytes behind"),
    "dead delay": Hunt(("retry delay", "abort"), "too early"),
    "dead blocks": Hunt(("retry delay", "abort"), "is empty, and item"),
    "dead clock": Hunt(("retry delay", "abort", "jump"), "too early", first_seed=290),
    "dead discard": Hunt(("retry delay", "abort", "discard"), "too early"),
    "dead waits": Hunt(("retry delay", "abort", "get_future"), "wait in"),
    "dead zero": Hunt(("retry delay", "abort"), "too early"),
    "dead late": Hunt(("max deliveries", "abort"), "and 0 count|which is done"),
    "dead uncounted": Hunt(("max deliveries", "abort"), "and 0 count"),
    "dead restarts": Hunt(("max deliveries", "abort", "kill", "checkpoint", "open"), "has failed"),
    "dead reason": Hunt(("dead letter", "abort"), "nobody has put"),
    "dead once": Hunt(("dead letter", "dead_fail", "advance"), "nothing moves it", first_seed=170),
    "dead twice": Hunt(("dead letter", "dead_fail", "open", "reader"), ", too|it is not dead|is done", first_seed=38),
    "dead first": Hunt(("dead letter", "dead_fail"), "in neither|are lost"),
    "dead back": Hunt(("dead letter", "abort", "dead_read"), "in neither|are lost"),
    "dead head": Hunt(("dead letter", "abort", "dead_read"), "other bytes|has put"),
    "dead hook": Hunt(("dead letter", "abort", "hooks"), ", too|it is not dead"),
    "room skipped": Hunt(("lag skips", "put_many", "large batches", "advance"), "says that it was moved"),
    "room forgets": Hunt(("lag skips", "put_many", "large batches", "advance", "kill"), "is done|has opened with"),
    "room eager": Hunt(("lag skips", "put", "advance"), "was moved, "),
    "room stays": Hunt(("lag skips", "put_many", "large batches", "advance"), "stays"),
    "room silent": Hunt(("lag skips", "put_many", "large batches", "advance", "close_reader"), "nobody was told"),
    "ship acks": Hunt(("ship", "put"), "acknowledged, and the log|delivers item"),
    "ship shown": Hunt(("ship", "put", "put_future", "get"), "and the log ends"),
    "ship flush": Hunt(("ship", "ship_flush", "put"), "flush\\(\\) has returned"),
    "ship retire": Hunt(
        ("ship", "churn", "ship_flush", "large batches"), "NotShipped|not in the|FileNotFound|has failed"
    ),
    "ship files": Hunt(("ship", "ship_run", "put", "EMFILE", "fault"), "has died of"),
    "ship fenced": Hunt(("ship", "ship_take", "EMFILE", "fault", "ship_run", "put"), "has failed"),
    "ship footer": Hunt(
        ("ship", "ship_flush", "ship_collect", "put", "full", "fill", "ENOSPC", "fault"), "StoreDamaged"
    ),
    "ship mark": Hunt(("ship", "publish", "visit", "close"), "own log"),
    "ship hand over": Hunt(("ship", "ship_hand_over", "ship_take", "ship_status"), "hand_over has returned"),
    "ship waits": Hunt(("ship", "ship_status", "ship_store", "close"), "for a store for ever"),
    "ship jobs": Hunt(("ship", "jobs", "many jobs", "job_put_many", "ship_store", "advance"), "Hang"),
    "ship readers": Hunt(("ship", "ship_restore", "reader", "advance"), "has passed"),
    "ship lease": Hunt(("ship", "ship_store", "advance", "put"), "its lease of"),
    "ship behind": Hunt(("ship", "ship_store", "put"), "a put is accepted, and"),
    "ship silence": Hunt(("ship", "open", "close"), "without a word"),
    "ship owner": Hunt(("ship", "ship_take", "open", "close"), "another owner has it"),
    "ship close": Hunt(("ship", "put", "close"), "are not in the store"),
    "ship requests": Hunt(("ship", "ship_status"), "talks to"),
    "arrow rest": Hunt(("arrow", "put"), "arrow shows|and are not in the journal"),
    "arrow retired": Hunt(("arrow", "churn", "meanwhile", "storm", "large batches"), "FilesNotSeen|FileNotFound"),
    "arrow proof": Hunt(("arrow", "churn", "meanwhile", "storm", "large batches"), "a reader needs|no later segment"),
    "metrics open items": Hunt(("get", "commit"), "a scrape of"),
    "metrics trouble": Hunt(("sync", "fault", "EIO"), "kestrel_up is 1"),
    "metrics inbox": Hunt(("publish", "put"), "a watch says that"),
    "metrics watch": Hunt(("commit", "checkpoint_all", "reader"), "a watch says"),
    "standby early": Hunt(("ship", "ship_follow", "ship_take_over", "advance"), "owner is alive", first_seed=340),
    "standby gone": Hunt(("ship", "ship_follow", "advance"), "would take over|and it is"),
    "standby begins": Hunt(("ship", "ship_follow", "ship_take_over"), "sees another store has taken"),
    "standby closed": Hunt(("ship", "ship_follow", "close"), "the owner is alive"),
    "standby readers": Hunt(("ship", "ship_follow", "ship_take_over", "reader", "advance", "ship_flush"), "has passed"),
    "standby tail": Hunt(("ship", "ship_follow", "put"), "are not there|damaged|Corrupt|FileNotFound"),
    "standby open": Hunt(("ship", "ship_follow"), "folder of a standby is opened"),
    "standby ids": Hunt(
        ("ship", "ship_follow", "ship_take_over", "ship_rejoin", "put"), "and are in the log", first_seed=125
    ),
    "rejoin loses": Hunt(("ship", "ship_rejoin", "ship_take", "put"), "are not set aside"),
    "rejoin open": Hunt(("ship", "ship_rejoin", "ship_take", "put"), "is opened before it follows"),
    "rejoin merges": Hunt(("ship", "ship_rejoin", "ship_take", "put"), "are not set aside"),
    "lazy hole": Hunt(("ship", "ship_lazy", "put_many", "large batches"), "Corrupt|damaged"),
    "lazy open": Hunt(("ship", "ship_lazy", "put_many", "large batches"), "not all here is opened"),
    "lazy away": Hunt(("ship", "ship_lazy", "put_many", "large batches"), "Corrupt|damaged"),
}


LATER = (
    "C12",
    "C13",
    "C8",
    "C28c",
    "C29 verify",
    "H12 in a scan",
    "P3, the count",
    "U15",
    "U17",
    "U8",
    "U8 (goes)",
    "dead large",
)
"""For which the explorer has no operations yet: damage in a work queue, the limit of its tubes, forks that are counted
on, and the counts of refused batches. Others it meets too seldom: the collector at the right place ("C8"), what has to
happen within one operation of the disk, such as a writer that retires or erases all that was listed ("C29 verify", "H12
in a scan"), a put that comes late, with the key of the only job of a tube that nobody watches ("U17"), and an item
that is too large for the queue of the dead letters while others die beside it ("dead large"). A producer
that nobody has woken looks by itself every ``LOOK_SECONDS``, which the schedules take for no harm ("C13"). Of "C28c" it
sees nothing, as it counts blocks of memory. For each of these the test that is named with it finds it.
"""


def search(hunt: Hunt) -> tuple[Failure | None, int]:
    """Seeds until it is found, or the steps are done: what was found, and after how many steps."""
    done, seed = 0, hunt.first_seed
    for seed in range(hunt.first_seed, hunt.first_seed + hunt.schedules):
        try:
            use_scenes_threads.run(seed, 1, hunt.lean)
        except BrokenSchedule as broken:
            if re.search(hunt.says, str(broken)):
                return Failure(seed, hunt.lean, [], broken, []), seed
    if hunt.schedules:
        return None, hunt.schedules
    with Watchdog() as watchdog, patch.object(use_explorer, "PATIENCE", 2):
        while done < hunt.steps:
            try:
                done += play(seed, draw(seed, use_explorer.STEPS, hunt.lean), hunt.lean, watchdog).steps
            except Failure as failure:
                done += len(failure.steps)
                if re.search(hunt.says, failure.what):
                    return failure, done
            seed += 1
    return None, done


def main() -> None:
    for each in sorted(Path(__file__).parent.glob("planted_*.py")):
        importlib.import_module(f"tests.use.{each.stem}")
    for name in sys.argv[1:] or HUNTS:
        begun = time.monotonic()
        with DEFECTS[name].plant():
            failure, done = search(HUNTS[name])
        seconds = time.monotonic() - begun
        said = "NOT FOUND" if failure is None else f"seed {failure.seed}: {failure.what[:100]}"
        print(f"{name:8} {done:7,} steps {seconds:5.1f} s  {said}", flush=True)


if __name__ == "__main__":
    main()
