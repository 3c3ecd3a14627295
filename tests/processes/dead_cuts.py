"""Real power cuts, at any moment, of a queue whose items die, of that of its dead letters, and of who puts them back:
each item that the queue has had is in one of the two at the end, once. For root.

What is at work is that of ``dead_kills``, on a file system of its own.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import cast

import portalocker  # noqa: F401 - imported once here and not by every child

from tests.processes.dead_kills import check, consumer, dead_owner, putter_back, reader_elsewhere, writer
from tests.processes.inbox_kills import start
from tests.processes.loop_mount import Kind, LoopFileSystem, own_mounts
from tests.processes.programs import as_program, rounds


def main(
    what: str, seed: int, limit: int | None, seconds: float | None, plant: Callable[[], object] | None
) -> Counter[str]:
    """``what``: the kind of the file system, and whether the reader is its owner's or ``elsewhere``: ``ext4 owner``."""
    if plant is not None:
        plant()
    own_mounts()
    kind, _, where = what.partition(" ")
    choose, counts = random.Random(seed), Counter[str]()
    with (
        tempfile.TemporaryDirectory() as folder,
        LoopFileSystem(cast(Kind, kind), 64, folder) as power,
    ):
        for _ in rounds(1, None, lambda: limit is None or is_enough(counts, limit)):
            for _ in rounds(limit, seconds):
                work: list[tuple[Callable[..., None], tuple[str, ...]]] = [
                    (consumer, ()) if where == "owner" else (reader_elsewhere, ()),
                    (putter_back, (f"{choose.random()}",)),
                    (dead_owner, ()),
                ]
                if where != "owner":
                    work.append((writer, ()))
                running = [start(program, power.path, *arguments) for program, arguments in work]
                time.sleep(0.05 + choose.random() * 0.25)
                power.shut_down()
                for pid in running:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                for pid in running:
                    os.waitpid(pid, 0)
                power.remount()
                counts["cuts"] += 1
                if choose.random() < 0.3:
                    check(power.path, counts)
            check(power.path, counts)
    return counts


def is_enough(counts: Counter[str], cuts: int) -> bool:
    """Whether there were items; two cuts may come before the first letter, but ten do not."""
    return counts["items"] > 0 and (cuts < 10 or min(counts["letters"], counts["put back"]) > 0)


if __name__ == "__main__":
    as_program(main)
