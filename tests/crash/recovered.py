"""Opening what a crash has left, reading all of it, and holding it against the promise.

The numbers in the messages are those of the invariants: (1) what was promised and not committed is delivered,
byte-equal; (2) nothing saved as committed is; (3) nothing that was never put; (4) rising ids; (5) no hole; (6)
recovering twice gives the same; (7) new ids never collide; (8) a second crash keeps all this; (9) no foreign file is
touched; (10) opening never raises for legal states; (11) bounded time and memory; (12) after a clean close, opening
reads no payload; (13) damage is never silent; (14) error counts survive; (15) items and bytes are exact; (16) looks
from outside object to nothing that an opening accepts.
"""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

from kestrelpy import CorruptJournal, Item, JournaledQueue, KestrelError, QueueEmpty, Reader, ReaderConfig, scan, verify
from kestrelpy._disk.interface import Directory, Disk
from kestrelpy._disk.memory import MemoryFile
from kestrelpy._journal import format as fmt
from kestrelpy._journal.file_names import parse_checkpoint, parse_segment
from kestrelpy._journal.segment import iterate_frames, load_segment, read_header
from kestrelpy._process import forget
from kestrelpy.testing import CrashingDisk, ManualClock, PowerModel
from kestrelpy.testing._choices import Leaning
from tests.crash.promise import READERS, BrokenPromise, Promise, Put
from tests.support.queues import Sync

MODELS = (PowerModel.PREFIX, PowerModel.EXT4, PowerModel.ANY)
ENDS = ("close", "kill", "kill", *MODELS)
READS_OF_AN_OPENING = 6
"""An opening reads no more than so many times what there is: the header, the frames, what is behind them."""
READ_AFTER_A_CLOSE = 1024
"""Bytes read of each segment by an opening after a clean close: header and footer."""
FOREIGN = {"other.notes": b"not ours", "jobs.0000000000001.segment.old": b"not quite ours", "jobs2.lock": b""}
CONFIG = ReaderConfig(memory_bytes=2048)
Seen = dict[str, dict[int, bytes]]
opened: weakref.WeakSet[JournaledQueue] = weakref.WeakSet()


class Unread(NamedTuple):
    """What a reader would get."""

    id: int
    data: bytes
    expires_ms: int | None
    error_count: int


@dataclass
class Setting:
    """How the workload's queue is opened."""

    sync: Sync
    archive: bool
    segment_bytes: int
    keeps: bool = False
    """Nothing that is consumed goes."""

    def open(
        self, disk: Disk, now_ms: int, *, on_corruption: Literal["raise", "quarantine"] = "raise"
    ) -> tuple[JournaledQueue, ManualClock]:
        clock = ManualClock(now_ms)
        queue = JournaledQueue(
            "/data",
            "jobs",
            sync=self.sync,
            segment_bytes=self.segment_bytes,
            archive_dir="/archive" if self.archive else None,
            keep_bytes=1 << 40 if self.keeps else None,
            default_reader=CONFIG,
            on_corruption=on_corruption,
            clock=clock,
            disk=disk,
        )
        opened.add(queue)
        return queue, clock

    def existing(self, disk: Disk) -> dict[int, bytes]:
        """Every item in live and archived segments."""
        archive = "/archive" if self.archive else None
        return {record.id: record.data for record in scan("/data", "jobs", archive_dir=archive, disk=disk)}


def vanish(queue: JournaledQueue, disk: CrashingDisk, *detached: Reader) -> None:
    """The death of the processes: no call is made, nothing is written."""
    disk.kill()
    forget(queue)
    queue._abandon()
    for reader in detached:
        bury(reader)
    take_apart(queue)


def bury(reader: Reader) -> None:
    """The death of the process of a reader elsewhere."""
    outside: Any = reader._source
    forget(outside)
    locks = list(outside._registry._locks.values())
    outside._abandon()
    for lock in locks:
        lock.release()


def take_apart(queue: JournaledQueue) -> None:
    """What refers to each other goes at once, without the collector: hundreds of thousands of queues come here."""
    opened.discard(queue)
    registry, source = queue._registry, queue._source
    for part in (*registry.open.values(), registry, source, source.journal, queue._syncer.commit, queue):
        part.__dict__.clear()


def abandon_all() -> None:
    """Let go of every queue that a broken promise has left open."""
    for queue in list(opened):
        if not queue.closed:
            forget(queue)
            queue._abandon()
    opened.clear()


def read_all(reader: Reader) -> list[Item]:
    items: list[Item] = []
    try:
        while True:
            items += reader.get_many(100, timeout=0)
    except QueueEmpty:
        return items


@dataclass
class Recovered:
    """What one recovery brought."""

    seen: Seen = field(default_factory=dict)
    errors: dict[str, dict[int, int]] = field(default_factory=dict)
    heads: dict[str, int] = field(default_factory=dict)
    tail_id: int = 0


def recover(setting: Setting, disk: CrashingDisk, promise: Promise, *, power: bool) -> tuple[JournaledQueue, Recovered]:
    """Open, read everything, check it. The queue is open then, and its readers have read to the end."""
    found = Recovered()
    try:
        read_before, size = disk.bytes_read, disk_bytes(disk)
        queue, _ = setting.open(disk, promise.now_ms)
        if disk.bytes_read - read_before > READS_OF_AN_OPENING * size:
            raise BrokenPromise(f"(11) opening {size} bytes has read {disk.bytes_read - read_before}")
        known = promise.known()
        for name in READERS:
            reader = queue.reader(name, start="earliest")
            found.heads[name] = reader.head
            items = read_all(reader)
            found.seen[name] = {item.id: item.data for item in items}
            found.errors[name] = {item.id: item.error_count for item in items if item.error_count}
            if [item.id for item in items] != sorted(found.seen[name]):
                raise BrokenPromise(f"(4) {name}: ids do not rise: {[item.id for item in items]}")
            size = sum(len(item.data) for item in items)
            if (reader.items, reader.bytes) != (len(items), size):
                raise BrokenPromise(
                    f"(15) {name}: counts {reader.items}, {reader.bytes} bytes; got {len(items)}, {size}"
                )
            check_reader(name, items, promise, known, power=power)
        found.tail_id = queue.stats().tail_id
        queue._check()
    except (KestrelError, OSError) as error:
        raise BrokenPromise(f"(10) opening or draining raised {error!r}") from error
    return queue, found


def drain(setting: Setting, disk: CrashingDisk, promise: Promise, *, power: bool) -> Recovered:
    """Recover, and go away without a word. Leaves the disk recovered."""
    queue, found = recover(setting, disk, promise, power=power)
    vanish(queue, disk)
    return found


def disk_bytes(disk: CrashingDisk) -> int:
    """What an opening may read: all files, each with its room, and something for the small ones."""
    return 4096 + sum(node.size for folder in disk.folders.values() for node in folder.names.values())


def check_reader(
    name: str, items: Sequence[Item | Unread], promise: Promise, known: Mapping[int, Put], *, power: bool
) -> None:
    """Invariants 1, 2, 3, 5 and 14."""
    reader = promise.readers[name]
    place = reader.power if power else reader.kill
    seen = {item.id: item.data for item in items}
    if again := place.surely & seen.keys():
        raise BrokenPromise(f"(2) {name}: items {sorted(again)} were committed and saved, and come again")
    for item in items:
        put = known.get(item.id)
        if put is None or put.data != item.data or put.expires_ms != item.expires_ms:
            raise BrokenPromise(f"(3) {name}: item {item.id} was never put: {item.data[:20]!r}")
        if put.is_expired(promise.now_ms):
            raise BrokenPromise(f"(3) {name}: item {item.id} has expired and comes")
        if item.error_count < place.errors.get(item.id, 0):
            raise BrokenPromise(f"(14) {name}: item {item.id} has error_count {item.error_count}")
    started = len(seen.keys() & set(range(promise.tail_id + 1, promise.tail_id + len(promise.in_flight) + 1)))
    if started not in (0, len(promise.in_flight)):
        raise BrokenPromise(f"(1) {name}: of a batch of {len(promise.in_flight)} there are {started}")
    if place.maybe is None:
        return
    kept_id, last_id = promise.kept_id(power=power), max(seen, default=0)
    for item_id, put in promise.acknowledged.items():
        if item_id in seen or item_id in place.maybe or put.is_expired(promise.now_ms):
            continue
        if item_id <= kept_id:
            raise BrokenPromise(f"(1) {name}: item {item_id} was promised and is not there; {sorted(seen)}")
        if item_id < last_id:
            raise BrokenPromise(f"(5) {name}: item {item_id} is missing before {last_id}")


def check(
    setting: Setting,
    disk: CrashingDisk,
    promise: Promise,
    choose: random.Random,
    *,
    power: bool,
    twice: float,
    least: int = 0,
) -> int:
    """All that holds for a disk after a crash; how many crash states were seen in it.

    What was recovered goes on at once, as in a program, or (``twice``: how likely) is recovered once more before.
    ``least``: ids up to here were given out, and the disk showed it before a recovery was cut short.
    """
    queue, found = recover(setting, disk, promise, power=power)
    if found.tail_id < least:
        raise BrokenPromise(f"(7) ids up to {least} were in use, and only {found.tail_id} of them are known now")
    states = 1
    if choose.random() < twice:
        vanish(queue, disk)
        queue, again = recover(setting, disk, promise, power=power)
        states += 1
        if again.seen != found.seen:
            raise BrokenPromise(f"(6) a second recovery gives {again.seen.keys()}, not {found.seen.keys()}")
    if setting.keeps or choose.random() < (0.5 if setting.archive else 0.1):
        check_existing(setting, disk, promise, power=power)
    try:
        states += go_on(setting, disk, queue, promise, found, choose, power=power)
    except (KestrelError, OSError) as error:
        raise BrokenPromise(f"(8) two more puts, and then: {error!r}") from error
    folder = disk.directory("/data")
    for name, content in FOREIGN.items():
        if name not in folder.names() or folder.open(name).read(0, 100) != content:
            raise BrokenPromise(f"(9) the file {name} is not ours and was touched")
    return states


def check_existing(setting: Setting, disk: CrashingDisk, promise: Promise, *, power: bool) -> None:
    """What ``scan`` sees: nothing but what was put; with an archive, or if all is kept, all that was promised."""
    try:
        existing, known = setting.existing(disk), promise.known()
    except (KestrelError, OSError) as error:
        raise BrokenPromise(f"(10) scan raised {error!r}") from error
    for item_id, data in existing.items():
        if item_id not in known or known[item_id].data != data:
            raise BrokenPromise(f"(3) item {item_id} in the journal was never put: {data[:20]!r}")
    if setting.archive or setting.keeps:
        kept_id = promise.kept_id(power=power)
        lost = sorted(item_id for item_id in promise.acknowledged if item_id <= kept_id and item_id not in existing)
        if lost:
            raise BrokenPromise(f"(1) items {lost} are neither in the journal nor in the archive")


def check_looks(setting: Setting, disk: CrashingDisk) -> None:
    """(16) Where an opening has nothing to object to, ``scan`` and ``verify`` have nothing, but a damaged place."""
    if "/data" not in disk.folders or (setting.archive and "/archive" not in disk.folders):
        return
    try:
        report, existing = verify("/data", "jobs", disk=disk), setting.existing(disk)
    except (KestrelError, OSError) as error:
        raise BrokenPromise(f"(16) a look raised {error!r}") from error
    damage = [damage for damage in report.damage if not damage.path.endswith(".checkpoint")]
    if damage:
        raise BrokenPromise(f"(16) verify reports {damage}; there are {sorted(existing)}")


def go_on(
    setting: Setting,
    disk: CrashingDisk,
    queue: JournaledQueue,
    promise: Promise,
    before: Recovered,
    choose: random.Random,
    *,
    power: bool,
) -> int:
    """Life goes on: two more items, a commit, an end of one kind or another, and everything is there, with ids of its
    own.

    What a kill left of a reader's place was perhaps never durable. If the power goes now an older one counts: what was
    committed since comes again, and what a seek went back for does not. Returns how many crash states that were.
    """
    new = {queue.put(data): data for data in (b"one more", b"and another")}
    for name in READERS:
        if min(new) <= max(before.heads[name], before.tail_id, *before.seen[name], 0):
            raise BrokenPromise(f"(7) new ids {sorted(new)} were in use: {before.heads}, {before.tail_id}")
    end = choose.choice(ENDS)
    done = _commit_one(queue, choose) if choose.random() < 0.5 else {}
    if end == "close":
        queue.close()
        take_apart(queue)
    elif end == "kill":
        vanish(queue, disk)
    else:
        queue.sync()
        vanish(queue, disk)
        assert isinstance(end, PowerModel)
        disk = disk.after_power_cut(Leaning(choose), end)
    with reads_of_segments() as read:
        queue, _ = setting.open(disk, promise.now_ms)
    if end == "close" and any(size > READ_AFTER_A_CLOSE for size in read.values()):
        raise BrokenPromise(f"(12) opening what was closed has read bytes of segments: {read}")
    for name in READERS if choose.random() < 0.2 else (choose.choice(READERS),):
        after = {item.id: item.data for item in read_all(queue.reader(name, start="earliest"))}
        due = {**before.seen[name], **new}
        if end not in MODELS and done.get(name, 0) in after:
            raise BrokenPromise(f"(8) {name}: item {done[name]} was committed and saved, and comes again after {end}")
        if end not in MODELS or done.get(name, 0) not in after:
            due.pop(done.get(name, 0), None)
        if end in MODELS and not power:
            place, known = promise.readers[name].power, promise.known()
            again = after.keys() - due.keys() - place.surely
            if any(known[item_id].data != after.pop(item_id) for item_id in again):
                raise BrokenPromise(f"(3) {name}: of the items {sorted(again)} some were never put")
            # Of a reader that was being dropped nothing is promised, and the place that it had may come back.
            optional = before.seen[name].keys() if place.maybe is None else place.maybe
            due = {key: data for key, data in due.items() if key in after or key not in optional}
        if after != due:
            raise BrokenPromise(
                f"(8) {name}: after two more puts and {end} there are {sorted(after)}, not {sorted(due)}"
            )
    if choose.random() < 0.2:
        queue.close()
        take_apart(queue)
    else:
        vanish(queue, disk)
    return end != "close"


@contextmanager
def reads_of_segments() -> Iterator[Counter[str]]:
    """How many bytes are read of each segment. (A place is no payload, and is read as far as it goes.)"""
    counts: Counter[str] = Counter()
    real = MemoryFile.read

    def read(self: MemoryFile, offset: int, size: int) -> bytes:
        data = real(self, offset, size)
        if self._name.endswith(".segment"):
            counts[self._name] += len(data)
        return data

    with patch.object(MemoryFile, "read", read):
        yield counts


def _commit_one(queue: JournaledQueue, choose: random.Random) -> dict[str, int]:
    """One of the items that a reader has open is committed and the place saved, not durably: reader and id."""
    name = choose.choice(READERS)
    reader = queue.reader(name)
    opened = list(reader._backlog.opened)
    if not opened:
        return {}
    item_id = choose.choice(opened)
    reader.commit(item_id)
    reader.checkpoint()
    return {name: item_id}


# -- what is not a crash ---------------------------------------------------------------------------------------------


def lose_checkpoint(disk: CrashingDisk, choose: random.Random) -> bool:
    """One reader's checkpoint is damaged, or gone. Returns whether another one is left."""
    folder = disk.directory("/data")
    there = sorted(name for name in folder.names() if parse_checkpoint(name, "jobs") is not None)
    if there:
        name = choose.choice(there)
        if choose.random() < 0.5:
            folder.unlink(name)
        else:
            file = folder.open(name, write=True)
            file.write(20, b"\xff" * 60)
    disk.kill()
    return len(there) > 1


def has_gap(disk: CrashingDisk) -> bool:
    """A retired segment has come back with a power cut, and one that was retired after it has not."""
    folder = disk.directory("/data")
    headers = [read_header(folder.open(name), name) for name in _segment_names(folder)]
    there = sorted((header.number, header.previous_number) for header in headers if header is not None)
    return any(previous != before for (before, _), (_, previous) in pairwise(there))


def damage(disk: CrashingDisk, choose: random.Random) -> bool:
    """Damage something that something else on the disk shows to have been durable; false if there is no such thing.

    One bit of a frame; or a segment that a later one names, which goes, or ends between two of its frames.
    """
    folder = disk.directory("/data")
    names = [name for name in _segment_names(folder) if read_header(folder.open(name), name) is not None]
    if len(names) > 1 and choose.random() < 0.4:
        name = choose.choice(names[:-1])
        frames = _durable_frames(folder, name)
        if not frames or choose.random() < 0.5:
            folder.unlink(name)
        else:
            folder.open(name, write=True).truncate(choose.choice(frames)[1])
    else:
        frames = [frame for name in names for frame in _durable_frames(folder, name)]
        if not frames:
            return False
        name, offset, size = choose.choice(frames)
        file = folder.open(name, write=True)
        at = offset + choose.randrange(size)
        file.write(at, bytes([file.read(at, 1)[0] ^ (1 << choose.randrange(8))]))
    disk.kill()
    return True


def _segment_names(folder: Directory) -> list[str]:
    return sorted(name for name in folder.names() if parse_segment(name, "jobs") is not None)


def _durable_frames(folder: Directory, name: str) -> list[tuple[str, int, int]]:
    """The frames of a segment that its footer covers, or whose ids the watermark of a later frame covers."""
    file = folder.open(name)
    header = read_header(file, name)
    if header is None:
        return []
    segment = load_segment(file, "jobs", header)
    frames = [
        (offset, frame)
        for offset, frame in iterate_frames(file, header.marker, fmt.HEADER_BYTES, file.size())
        if frame.footer is None
    ]
    if segment.closed:
        return [(name, offset, frame.size) for offset, frame in frames]
    return [
        (name, offset, frame.size)
        for at, (offset, frame) in enumerate(frames)
        if any(later.watermark >= frame.last_id for _, later in frames[at + 1 :])
    ]


def check_damaged(setting: Setting, disk: CrashingDisk, promise: Promise) -> None:
    """(13) Something durable is damaged: that is said, or nothing that was promised is missing."""
    try:
        queue, _ = setting.open(disk, promise.now_ms)
    except CorruptJournal:
        return
    try:
        for name in READERS:
            items = read_all(queue.reader(name, start="earliest"))
            check_reader(name, items, promise, promise.known(), power=False)
    except CorruptJournal:
        pass
    except BrokenPromise as broken:
        raise BrokenPromise(f"(13) damage is not reported: {broken}") from broken
    vanish(queue, disk)


def check_hostile(setting: Setting, disk: CrashingDisk, promise: Promise) -> None:
    """A disk that has broken its own promises may cost items; it may not make an opening or a reader do anything but
    raise what is documented, or deliver what was never put.
    """
    known = {put.data for put in promise.known().values()}
    for on_corruption in ("raise", "quarantine"):
        copy = disk.after_kill()
        try:
            queue, _ = setting.open(copy, promise.now_ms, on_corruption=on_corruption)
        except KestrelError:
            continue
        try:
            for name in READERS:
                delivered = {item.data for item in read_all(queue.reader(name, start="earliest"))}
                if phantoms := delivered - known:
                    raise BrokenPromise(f"(3) {name}: delivered and never put: {sorted(phantoms)}")
        except KestrelError:
            pass
        vanish(queue, copy)
