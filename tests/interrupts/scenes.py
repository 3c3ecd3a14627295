"""A queue on a simulated disk, what its user knows of it, and what must hold after an interrupt.

The user notes what it begins and what has returned. What was begun and did not return may have happened or not, whole;
everything else is known exactly. The numbers in the messages: (1) no lock is held; (2) the invariants of ``_check``;
(3) no id twice; (4) nothing acknowledged is lost; (5) nothing done comes again, and nothing twice; (6) what an
interrupted get had in its hands comes again; (7) nobody waits in vain; (8) file and memory agree; (9) a kill, and a
power cut after a sync, leave what memory had; (10) counts are exact; (11) closing gives everything back.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, cast

from kestrelpy import Item, JournaledQueue, QueueEmpty, Reader, UnknownItem, _process, open_reader, scan
from kestrelpy._disk import memory
from kestrelpy._process import forget
from kestrelpy._reading.detached_source import DetachedSource
from kestrelpy.testing import CrashingDisk, ManualClock, PowerModel
from kestrelpy.testing._choices import Leaning

FAR = "far"
"""The name of a reader that is opened as from another process."""
START_MS = 1_700_000_000_000
MODELS = (PowerModel.PREFIX, PowerModel.EXT4, PowerModel.ANY)


class Broken(AssertionError):
    """Something that must hold does not."""


def demand(holds: object, message: str) -> None:
    if not holds:
        raise Broken(message)


class User:
    """What one reader's user knows: what it holds, what is done, and what it was about to do."""

    def __init__(self) -> None:
        self.held: dict[int, Item] = {}
        self.done: set[int] = set()
        self.unsaved: set[int] = (
            set()
        )  # done, and may come again: the checkpoint was to be made by what was interrupted
        self.committing: set[int] = set()
        self.aborting: set[int] = set()

    def got(self, items: Iterable[Item]) -> None:
        for item in items:
            demand(item.id not in self.held and item.id not in self.done, f"(5) item {item.id} comes twice")
            self.unsaved.discard(item.id)
            self.held[item.id] = item

    def commit(self, reader: Any, *ids: int) -> None:
        self.committing |= set(ids)
        if len(ids) == 1:
            reader.commit(self.held[ids[0]])
        else:
            reader.commit_many([self.held[item_id] for item_id in ids])
        self.committed(ids)

    def committed(self, ids: Iterable[int]) -> None:
        for item_id in ids:
            self.committing.discard(item_id)
            del self.held[item_id]
            self.done.add(item_id)

    def abort(self, reader: Any, item_id: int) -> None:
        self.aborting.add(item_id)
        reader.abort(self.held[item_id])
        self.aborting.discard(item_id)
        del self.held[item_id]


class Scene:
    """One queue and its users. ``readers``: their names; the first is ``self.reader``."""

    def __init__(self, readers: tuple[str, ...] = ("",), **options: Any) -> None:
        self.disk = CrashingDisk(mounts=["/archive"])
        self.clock = ManualClock(START_MS)
        self.options = options
        self.put: dict[int, bytes] = {}
        self.trying: list[tuple[bytes, ...]] = []
        self.futures: list[Future[Item]] = []
        self.dropped = False  # items may have been dropped, as asked for
        self.opened: list[JournaledQueue] = []
        self.queue = self.open()
        self.users = {name: User() for name in readers}
        self.far: Reader | None = None
        for name in readers:
            self.reader_of(name)

    def open(self, disk: CrashingDisk | None = None) -> JournaledQueue:
        self.opened.append(JournaledQueue("/data", "jobs", clock=self.clock, disk=disk or self.disk, **self.options))
        return self.opened[-1]

    @property
    def reader(self) -> Reader:
        return self.reader_of(next(iter(self.users)))

    def reader_of(self, name: str) -> Reader:
        if name != FAR:
            return self.queue.reader(name, start="earliest")
        if self.far is None:
            self.far = open_reader(
                "/data", "jobs", FAR, create=True, start="earliest", clock=self.clock, disk=self.disk
            )
        return self.far

    @property
    def user(self) -> User:
        return next(iter(self.users.values()))

    # -- what the user does ------------------------------------------------------------------------------------------

    def fill(self, count: int, data: bytes = b"old") -> None:
        for number in range(count):
            self.do_put(data + b"%d" % number)

    def do_put(self, *items: bytes, **options: Any) -> None:
        self.trying.append(items)
        ids = [self.queue.put(items[0], **options)] if len(items) == 1 else self.queue.put_many(items, **options)
        self.acknowledge(items, ids)

    def acknowledge(self, items: tuple[bytes, ...], ids: Iterable[int]) -> None:
        self.trying.remove(items)
        for item_id, data in zip(ids, items, strict=True):
            demand(item_id not in self.put, f"(3) id {item_id} is given out twice")
            self.put[item_id] = data

    def reopen(self) -> None:
        """The queue is closed, as far as it came: open reads come again, and what was done may."""
        for user in self.users.values():
            user.unsaved, user.done = user.unsaved | user.done, set()
            user.held.clear()
        self.queue = self.open()

    def take(self, count: int, user: User | None = None) -> None:
        self.user.got(self.reader.get_many(count, timeout=0))

    # -- what must hold ----------------------------------------------------------------------------------------------

    def check_locks(self) -> None:
        """(1) Nobody has a lock: there is one thread, and it is back."""
        queue, registry = self.queue, self.queue._registry
        held = {
            "queue._lock": queue._lock,
            "queue._held.syncing": queue._held.syncing,
            "registry._opening": registry._opening,
            "registry._limiting": registry._limiting,
            "registry._listing": registry._listing,
            "commit._lock": queue._syncer.commit._lock,
            "_process._guard": _process._guard,
            "clock._lock": self.clock._lock,
        }
        readers = [*registry.open.values(), *([] if self.far is None else [self.far])]
        for reader in readers:
            held[f"{reader.name}._lock"], held[f"{reader.name}._saving"] = (
                reader._backlog.lock,
                reader._checkpointer.lock,
            )
        if self.far is not None:
            held["outside._looking"] = cast("DetachedSource", self.far._source)._looking
        names = [name for name, lock in held.items() if lock.locked()]
        if "count=0" not in repr(memory._guard):
            names.append("_memory_disk._guard")
        demand(not names, f"(1) still locked: {names}")
        demand(queue._syncer.commit._leader is None, "(7) a sync has a leader who is gone")

    def check(self, choose: random.Random) -> None:
        """All that must hold once whatever was interrupted is over."""
        self.check_locks()
        self.do_put(b"after it")
        self.do_put(b"and", b"more")
        self._settle_doubts()
        items = self._collect_futures()
        for name, user in self.users.items():
            self._drain(self.reader_of(name), user, items)
            items = []
        self._check_counts()
        self.queue.checkpoint()
        self.queue._check()
        self._check_file()
        self._check_crash(choose, power=choose.random() < 0.5)
        self._finish()
        self._check_file()
        self._close(choose)

    def _settle_doubts(self) -> None:
        """Ask again for what was interrupted: it is refused if it is done already."""
        for name, user in self.users.items():
            reader = self.reader_of(name)
            for item_id in sorted(user.committing):
                try:
                    reader.commit(user.held[item_id])
                except UnknownItem:
                    demand(
                        item_id not in reader._backlog.requeued.entries,
                        f"(5) {item_id} was being committed and is unread",
                    )
            user.committed(sorted(user.committing))
            for item_id in sorted(user.aborting):
                with contextlib.suppress(UnknownItem):  # it was aborted before: then it comes by itself
                    reader.abort(user.held[item_id])
                del user.held[item_id]
            user.aborting.clear()

    def _collect_futures(self) -> list[Item]:
        items = []
        for future in self.futures:
            demand(future.done(), "(7) a future is left in line though there are items")
            if not future.cancelled():
                items.append(future.result())
        self.futures.clear()
        return items

    def _drain(self, reader: Reader, user: User, items: list[Item]) -> None:
        """(3 to 6) Everything that is not held and not done comes, once."""
        while True:
            try:
                items += [reader.get(timeout=0)] if len(items) < 2 else reader.get_many(5, timeout=0)
            except QueueEmpty:
                break
        if self.dropped and self.trying:
            self._adopt_dropped()
        doubtful = self._resolve(items)
        missing = self.put.keys() - user.done - user.unsaved - user.held.keys() - {item.id for item in items}
        if not self.dropped:
            demand(
                not missing,
                f"(4, 6) {reader.name!r}: items {sorted(missing)} do not come; open: {sorted(reader._backlog.opened)}",
            )
        for item in items:
            data = doubtful.get(item.id, self.put.get(item.id))
            demand(data == item.data, f"(3) item {item.id} is {item.data!r}, not {data!r}")
        user.got(items)
        demand(
            sorted(user.held) == sorted(reader._backlog.opened),
            f"(6) open are {sorted(reader._backlog.opened)}, held {sorted(user.held)}",
        )

    def _resolve(self, items: list[Item]) -> dict[int, bytes]:
        """What was tried and did not return, and is there all the same: whole, or not at all."""
        found = {item.id: item.data for item in items if item.id not in self.put}
        for batch in list(self.trying):
            ids = [item_id for item_id, data in sorted(found.items()) if data in batch]
            if ids:
                demand(len(ids) == len(batch), f"(8) of the batch {batch} there are {len(ids)}")
                self.acknowledge(batch, ids)
        return found

    def _adopt_dropped(self) -> None:
        """What was tried and did not return, and was dropped since: the file tells."""
        for record in scan("/data", "jobs", disk=self.disk):
            for batch in list(self.trying):
                if batch == (record.data,) and record.id not in self.put:
                    self.acknowledge(batch, [record.id])

    def _check_counts(self) -> None:
        """(10) What is counted is what there is."""
        for name, user in self.users.items():
            reader = self.reader_of(name)
            size = sum(len(item.data) for item in user.held.values())
            counts = (reader.items, reader.bytes, len(user.held), size)
            demand(counts[:2] == counts[2:], f"(10) {name!r}: counts {counts[:2]}, has {counts[2:]}")

    def _check_file(self) -> None:
        """(8) The journal has what was put and nothing else."""
        if self.options.get("on_corruption"):
            return  # a scan stops at what is damaged
        archive = self.options.get("archive_dir")
        there = {record.id: record.data for record in scan("/data", "jobs", archive_dir=archive, disk=self.disk)}
        for item_id, data in there.items():
            demand(self.put.get(item_id) == data, f"(8) item {item_id} in the file is {data!r}")
        kept = [segment.first_id for segment in self.queue._journal.segments] if archive is None else [1]
        missing = {item_id for item_id in self.put if item_id >= kept[0]} - there.keys()
        demand(not missing, f"(8) items {sorted(missing)} are not in the file")
        demand(max(there, default=0) <= self.queue._journal.tail_id, "(8) the file goes on behind the tail")

    def _check_crash(self, choose: random.Random, *, power: bool) -> None:
        """(9) What is open, or unread, is there after a crash."""
        disk = self.disk.after_kill()
        if power:
            self.queue.sync()
            disk = self.disk.after_power_cut(Leaning(choose), choose.choice(MODELS))
        recovered = self.open(disk)
        for name, user in self.users.items():
            items: list[Item] = []
            try:
                while True:
                    items += recovered.reader(name, start="earliest").get_many(100, timeout=0)
            except QueueEmpty:
                seen = {item.id: item.data for item in items}
            expected = {item_id: self.put[item_id] for item_id in user.held}
            lost = [item_id for item_id, data in expected.items() if seen.get(item_id) != data]
            demand(not lost, f"(9) after a crash {name!r} lacks {lost}")
            extra = seen.keys() - self.put.keys()
            demand(not extra, f"(9) after a crash {name!r} has {sorted(extra)}")
        demand(recovered.put(b"on") > max(self.put, default=0), "(3, 9) an id is given out again after a crash")
        recovered.close()

    def _finish(self) -> None:
        """Everybody is done with everything, and it is retired."""
        for name, user in self.users.items():
            reader = self.reader_of(name)
            for item_id in sorted(user.held, reverse=True):
                user.commit(reader, item_id)
            demand(
                (reader.items, reader.bytes, reader.open_items) == (0, 0, 0), f"(10) {name!r} is not empty: {reader}"
            )
        if self.far is not None:
            self.far.checkpoint(durable=True)
        self.queue.checkpoint(durable=True)
        self.queue._check()
        for name in self.users:
            head = self.reader_of(name).head
            demand(head == self.queue._journal.tail_id, f"(10) {name!r} is done up to {head} only")

    def _close(self, choose: random.Random) -> None:
        """(11) Closed properly; opened again there is nothing left."""
        if self.far is not None:
            self.far.close()
        self.queue.close()
        again = self.open()
        for name in self.users:
            demand(again.reader(name, start="earliest").items == 0, f"(9) {name!r} has items after a clean close")
        demand(again.put(b"on") > max(self.put, default=0), "(3) an id is given out again")
        again.close()
        left = [queue for queue in self.opened if queue._status.error is None]
        demand(not left, f"(11) not closed: {left}")

    def vanish(self) -> None:
        """Let go of everything, after a failure."""
        self.disk.kill()
        for queue in self.opened:
            forget(queue)
            queue._abandon()
        if self.far is not None:
            source = cast("DetachedSource", self.far._source)
            forget(source)
            source._abandon()
