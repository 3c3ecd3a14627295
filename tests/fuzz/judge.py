"""Opens damaged files and holds what comes out against the truth.

What is asked of files that an accident has damaged:

1. Only documented errors: ``CorruptJournal``, ``UnsupportedFormat``, another ``KestrelError``, ``OSError``.
2. Nothing is delivered that was never put under that id, and ids rise.
3. Nothing durable is passed over in silence: what the naive reader finds intact and a reader has not done is delivered,
   or an error is raised, or (with quarantine) counted.
4. Opening again gives the same.
5. Nothing is destroyed: what a segment held, it holds still, or a file that was kept aside does.
6. The time is bounded.
7. If the queue opens, what is put then is delivered, also after the next opening.
8. A reader in another process, with nobody at work on the queue, is told as well: what it has not done is delivered, or
   an error is raised. It cannot know where the newest segment ends.

Of files that were made to deceive, with checksums made right, 1 and 4 to 7 are asked, and no more items than the files
have room for.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Iterator, Mapping

from kestrelpy import KestrelError, QueueEmpty, open_reader, scan, verify
from kestrelpy._journal.file_names import lasting_name
from kestrelpy.inspection.summary import inspect
from kestrelpy.testing import ManualClock, MemoryDisk
from tests.fuzz.naive_reader import HEADER, Reading, read_queue
from tests.fuzz.reference import FOLDER, NAME, Case, disk_of, files_of, let_die, open_queue

SECONDS = 1.0
"""For one input of less than a megabyte; in seconds of processor time, as others share the machine."""
HUNG_SECONDS = 60
MOST_READS = 20_000
Delivered = dict[str, dict[int, bytes]]


class BrokenInvariant(AssertionError):
    """An invariant does not hold; the number in front is that of the list above."""


class Hung(BaseException):
    """An input took so long that it seems to have no end. No ``Exception``: nothing in between may swallow it."""


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Raise ``Hung`` if one input takes longer than any may; ``rearm`` begins the next. For the main thread. What the
    library logs of the damage is not kept.
    """

    def strike(*_: object) -> None:
        raise Hung(f"no end after {HUNG_SECONDS} s")

    before = signal.signal(signal.SIGALRM, strike)
    logging.disable(logging.CRITICAL)
    rearm()
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        logging.disable(logging.NOTSET)


def rearm() -> None:
    signal.alarm(HUNG_SECONDS)


def require(holds: object, what: str) -> None:
    if not holds:
        raise BrokenInvariant(what)


def drain(disk: MemoryDisk, mode: str, readers: tuple[str, ...]) -> tuple[Delivered, int, str]:
    """Open, read everything without committing, die. What each reader got, what was set aside, and the error."""
    delivered: Delivered = {}
    quarantined, error = 0, ""
    queue = None
    try:
        queue = open_queue(disk, on_corruption=mode)
        for name in readers:
            got = delivered[name] = {}
            reader = queue.reader(name, start="earliest")
            last_id = 0
            for _ in range(MOST_READS):
                try:
                    items = reader.get_many(1000, timeout=0)
                except QueueEmpty:
                    break
                for item in items:
                    aborted = item.error_count > 0
                    require(item.id > last_id or aborted, f"2: {name!r} got {item.id} behind {last_id}")
                    last_id = max(last_id, item.id)
                    got[item.id] = item.data
            else:
                raise BrokenInvariant(f"6: {MOST_READS} reads and no end")
        quarantined = queue.stats().quarantined
    except (KestrelError, OSError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    finally:
        if queue is not None:
            let_die(queue, disk)
        else:
            disk.kill()
    return delivered, quarantined, error


def drain_elsewhere(disk: MemoryDisk, name: str) -> tuple[dict[int, bytes], str]:
    """What a reader in another process gets, without committing, and the error."""
    got: dict[int, bytes] = {}
    try:
        with open_reader(FOLDER, NAME, name, create=True, start="earliest", disk=disk, clock=ManualClock()) as reader:
            for _ in range(MOST_READS):
                items = reader.get_many(1000, timeout=0)
                require(all(item.id > max(got, default=0) for item in items), f"2: {name!r} elsewhere: ids that fall")
                got |= {item.id: item.data for item in items}
            raise BrokenInvariant(f"6: {MOST_READS} reads elsewhere and no end")
    except QueueEmpty:
        return got, ""
    except (KestrelError, OSError) as raised:
        return got, f"{type(raised).__name__}: {raised}"
    finally:
        disk.kill()


def look(disk: MemoryDisk) -> tuple[str, dict[int, bytes], bool]:
    """What the read-only calls say: the error of a scan, if any, what it found, and whether ``verify`` is content."""
    before = files_of(disk)
    found: dict[int, bytes] = {}
    error = ""
    try:
        for record in scan(FOLDER, NAME, disk=disk):
            found[record.id] = record.data
    except (KestrelError, OSError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    fine = False
    with contextlib.suppress(KestrelError, OSError):
        fine = verify(FOLDER, NAME, disk=disk).ok
        inspect(FOLDER, NAME, disk=disk)
    require(files_of(disk) == before, "5: a look has changed a file")
    return error, found, fine


def goes_on(disk: MemoryDisk, mode: str, readers: tuple[str, ...]) -> None:
    """7. If it opens, a put works, and is there after the next opening."""
    queue = None
    try:
        queue = open_queue(disk, on_corruption=mode)
        ids = [queue.put(b"next"), *queue.put_many([b"and", b"more"])]
    except (KestrelError, OSError):
        return
    finally:
        if queue is not None:
            let_die(queue, disk)
        else:
            disk.kill()
    delivered, _, error = drain(disk, mode, readers)
    for name, got in delivered.items():
        found = [got.get(item_id) for item_id in ids]
        require(error or found == [b"next", b"and", b"more"], f"7: {name!r} was given {found} as {ids}")


def names_of_readers(files: Mapping[str, bytes]) -> tuple[str, ...]:
    """Named readers or the default one, as the undamaged folder has them."""
    named = tuple(sorted(name[len(NAME) + 1 : -11] for name in files if name.endswith(".checkpoint")))
    return named or ("",)


def nothing_destroyed(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> None:
    """Every byte that a segment held is there still; but for one that is nothing but a part of a header."""
    aside = [data for name, data in after.items() if name.endswith(".quarantine")]
    for name, data in before.items():
        used = data.rstrip(b"\0")
        if name.endswith(".segment") and used[HEADER:]:
            there = [after.get(each, b"") for each in (name, lasting_name(name))]
            kept = any(each.startswith(used) for each in there + aside)
            require(kept, f"5: {name} has lost bytes")


def judge(
    files: Mapping[str, bytes],
    case: Case,
    mode: str,
    *,
    forged: bool = False,
    thorough: bool = False,
    looking: bool = False,
    reading: Reading | None = None,
) -> str:
    """Hold one damaged folder against the list above; what came of it, in a word.

    ``looking``: also look with ``scan``, ``verify`` and ``inspect``. ``thorough``: that, and open it three times more.
    ``reading``: what the naive reader says, if it was asked before.
    """
    looking = looking or thorough
    started = time.process_time()
    disk = disk_of(files)
    readers = names_of_readers(case.files)
    seen_error, seen, fine = look(disk) if looking else ("", {}, False)
    delivered, quarantined, error = drain(disk, mode, readers)
    if thorough or error:
        nothing_destroyed(files, files_of(disk))
    if thorough:
        again, _, error_again = drain(disk, mode, readers)
        same = (again, error_again.partition(":")[0]) == (delivered, error.partition(":")[0])
        require(same, f"4: first {delivered} {error}, now {again} {error_again}")
        goes_on(disk, mode, readers)
    require(time.process_time() - started < SECONDS, f"6: {time.process_time() - started:.1f} s")
    if forged:
        count = max((len(got) for got in delivered.values()), default=0)
        require(count <= sum(map(len, files.values())), "6: more items than bytes")
        return outcome(error, quarantined)
    reading = reading or read_queue(files, NAME)
    if is_of_another_queue(reading, case):
        return "taken for another queue"
    against_the_truth(reading, case, delivered, error, mode, quarantined)
    if looking:
        told_elsewhere(files, case, readers[0], reading)
        require(is_true(case, seen), "2: scan found what was never put")
        require(not reading.damage or seen_error, f"3: scan has not seen {reading.damage}")
        require(not reading.damage or not fine, f"3: verify has not seen {reading.damage}")
        require(seen_error or set(reading.records) <= set(seen), "3: scan has passed over intact records")
    return outcome(error, quarantined)


def outcome(error: str, quarantined: int) -> str:
    return error.partition(":")[0] or ("some quarantined" if quarantined else "all delivered")


def is_true(case: Case, found: Mapping[int, bytes]) -> bool:
    """Whether all of it was put, under these ids."""
    return all(case.put.get(key) == data or (key, data) in case.torn for key, data in found.items())


def is_of_another_queue(reading: Reading, case: Case) -> bool:
    """The newest segment says whose the folder is, and no byte in it says that it was put there by a mistake."""
    headers = [segment.header.queue_id for segment in reading.segments if segment.header is not None]
    if not case.queue_ids:
        whole = read_queue(case.files, NAME).segments
        case.queue_ids = {segment.header.queue_id for segment in whole if segment.header is not None}
    return bool(headers) and headers[-1] not in case.queue_ids


def against_the_truth(
    reading: Reading, case: Case, delivered: Delivered, error: str, mode: str, quarantined: int
) -> None:
    """1, 2 and 3."""
    for name, got in delivered.items():
        require(is_true(case, got), f"2: {name!r} got what was never put, among {set(got)}")
    if error:
        foreign = error.startswith("NoDefaultReader") and "" in delivered
        require(foreign or error.startswith(("CorruptJournal", "UnsupportedFormat")), f"1: {error}")
        return
    for name, got in delivered.items():
        missing = {record.id for record in reading.unread(name)} - set(got)
        require(not missing, f"3: {name!r} was not given {missing}, which are intact")
        durable = {key for key in case.put if key <= reading.watermark and not reading.is_done(name, key)}
        lost = durable - set(got) - retired_ids(reading)
        require(not lost or mode == "quarantine", f"3: no error, but {name!r} was not given {lost}")
        require(not lost or quarantined, f"3: {name!r} was not given {lost} and nothing is counted")


def told_elsewhere(files: Mapping[str, bytes], case: Case, name: str, reading: Reading) -> None:
    """8. Of the segments before the newest one, that is."""
    got, error = drain_elsewhere(disk_of(files), name)
    require(is_true(case, got), f"2: {name!r} elsewhere got what was never put, among {set(got)}")
    if error:
        known = error.startswith(("CorruptJournal", "UnsupportedFormat", "NoDefaultReader", "UnknownReader"))
        require(known, f"1: elsewhere: {error}")
        return
    headers = [segment.header for segment in reading.segments if segment.header is not None]
    newest = headers[-1].previous_last_id if headers else 0
    lost = {key for key in case.put if key <= newest and not reading.is_done(name, key)} - set(got)
    require(not lost - retired_ids(reading), f"8: no error, but {name!r} elsewhere was not given {lost}")


def retired_ids(reading: Reading) -> set[int]:
    """Ids in front of the first segment: every reader was past them."""
    headers = [segment.header for segment in reading.segments if segment.header is not None]
    mine = [header for header in headers if header.queue_id == headers[-1].queue_id]
    return set(range(1, mine[0].previous_last_id + 1)) if mine else set()
