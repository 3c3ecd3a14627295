"""Random programs on a queue, with reads as Arrow at every step, each of which must show what ``scan`` shows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from unittest.mock import patch

import pyarrow as pa

from kestrelpy import CorruptJournal, JournaledQueue, QueueEmpty, UnsupportedFormat, scan
from kestrelpy.arrow import columns, pieces, read
from kestrelpy.arrow.columns import COLUMNS
from kestrelpy.testing import ManualClock, MemoryDisk
from tests.arrow.rows import rows_of, until_error
from tests.support.journals import ROW, fill, row_of
from tests.support.queues import START_MS

FOLDER, ARCHIVE = "/q", "/archive"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@contextmanager
def small_pieces(rnd: random.Random) -> Iterator[None]:
    """Blocks and batches are as small as the queues of these programs need, to have several of them."""
    blocks = rnd.choice([200, 1000, 4 << 20])
    with (
        patch.dict(pieces.PieceReader.__init__.__kwdefaults__, block_bytes=blocks),
        patch.object(pieces, "FIRST_BYTES", min(blocks, 300)),
        patch.object(columns, "MOST_ROWS", rnd.choice([1, 3, 64 << 10])),
        patch.object(columns, "MOST_BYTES", rnd.choice([1, 500, 16 << 20])),
    ):
        yield


class Started(NamedTuple):
    """A read that goes on. ``before``: what ``scan`` has shown when it was planned; ``None`` if it is not yet.
    ``known``: all that it has shown since.
    """

    reader: pa.RecordBatchReader
    bounds: dict[str, Any]
    before: list[ROW] | None
    found: list[ROW]
    known: dict[int, ROW]


class Program:
    """One queue, on a disk in memory, and what is done to it. ``saw``: what has happened that a test is after."""

    def __init__(self, rnd: random.Random) -> None:
        self.rnd = rnd
        self.saw: set[str] = set()
        self._disk = MemoryDisk()
        self._clock = ManualClock(START_MS)
        self._archives = rnd.random() < 0.5
        self._queue = self._open()
        self._started: Started | None = None

    def play(self, steps: int) -> None:
        """Raises ``AssertionError`` where a read shows something else than ``scan``."""
        with small_pieces(self.rnd):
            try:
                for _ in range(steps):
                    self._change()
                    self._check_read()
                    self._go_on()
            finally:
                self._queue.close()
            self._check_damaged()

    def _open(self) -> JournaledQueue:
        options: dict[str, Any] = {"archive_dir": ARCHIVE} if self._archives else {}
        return JournaledQueue(
            FOLDER, "jobs", segment_bytes=4096, sync="never", disk=self._disk, clock=self._clock, **options
        )

    # -- what is done ------------------------------------------------------------------------------------------------

    def _change(self) -> None:
        rnd = self.rnd
        what = rnd.randrange(8)
        if what < 3:
            fill(self._queue, rnd, rnd.choice([1, 10, 40]))
        elif what == 3:
            size = rnd.randrange(60)
            for _ in range(rnd.randrange(80)):
                self._queue.put(rnd.randbytes(size))
        elif what == 4:
            self._clock.advance(rnd.choice([0.001, 1, 1000]))
        elif what == 5:
            self._queue.close()
            self._queue = self._open()
        else:
            self._consume()

    def _consume(self) -> None:
        try:
            for item in self._queue.get_many(self.rnd.choice([1, 5, 200]), timeout=0):
                if self.rnd.random() < 0.05:
                    item.abort()
                else:
                    item.commit()
        except QueueEmpty:
            return
        self._queue.checkpoint(durable=True)

    # -- what is read ------------------------------------------------------------------------------------------------

    def _scanned(self) -> list[ROW]:
        options: dict[str, Any] = {"archive_dir": ARCHIVE} if self._archives else {}
        return [row_of(record) for record in scan(FOLDER, "jobs", disk=self._disk, **options)]

    def _read(self, **options: Any) -> pa.RecordBatchReader:
        if self._archives:
            options["archive"] = ARCHIVE
        return read(FOLDER, "jobs", disk=self._disk, **options)

    def _range(self, rows: list[ROW]) -> dict[str, Any]:
        rnd, found = self.rnd, dict[str, Any]()
        last_id = rows[-1][0] if rows else 1
        times = [row[1] for row in rows] or [START_MS * 1000]
        for name in ("start_id", "end_id"):
            if rnd.random() < 0.3:
                found[name] = rnd.randrange(last_id + 3)
        for name in ("start_time", "end_time"):
            if rnd.random() < 0.3:
                instant = rnd.choice(times)
                more = rnd.choice([0, 0, 1, 999, -1, 1000])
                is_number = not more and rnd.random() < 0.5
                found[name] = instant // 1000 if is_number else _EPOCH + timedelta(microseconds=instant + more)
        return found

    def _check_read(self) -> None:
        rows = self._scanned()
        bounds = self._range(rows)
        expected = [row for row in rows if is_within(row, bounds)]
        reader = self._read(**bounds)
        assert rows_of(reader) == expected, bounds
        names = self.rnd.sample(COLUMNS, self.rnd.randrange(1, len(COLUMNS) + 1))
        whole, some = self._read(**bounds).read_all(), self._read(columns=names, **bounds).read_all()
        assert some.column_names == names
        assert some == whole.select(names)
        self.saw |= {"rows"} if expected else set()
        self.saw |= {"a range"} if 0 < len(expected) < len(rows) else set()

    def _go_on(self) -> None:
        """A read that goes on while the queue changes: no row twice, none that is not right, and of those that are
        still there, all.
        """
        if self._started is None:
            if self.rnd.random() < 0.5:
                bounds = self._range(self._scanned())
                self._started = Started(self._read(**bounds), bounds, None, [], {})
                self.saw.add("a read that goes on")
            return
        reader, bounds, before, found, known = self._started
        if before is None:  # it is planned only now
            before = self._scanned()
            self._started = self._started._replace(before=before)
        try:
            found.extend(rows_of([reader.read_next_batch()]))
            known.update((row[0], row) for row in self._scanned())  # before the next step retires some of it
        except StopIteration:
            self._started = None
            now = self._scanned()
            ids = [row[0] for row in found]
            assert ids == sorted(set(ids))
            assert all(same(row, known[row[0]]) and is_within(row, bounds) for row in found)
            needed = {row[0] for row in before} & {row[0] for row in now if is_within(row, bounds)}
            assert needed <= set(ids), "a row is missing that was there all the time"
            self.saw |= {"a segment that was retired"} if len(now) < len(before) else set()

    # -- damage ------------------------------------------------------------------------------------------------------

    def _check_damaged(self) -> None:
        """What ``scan`` objects to is an error here, too, with no row after it, and nothing else is."""
        folder = self._disk.directory(FOLDER)
        names = [name for name in folder.names() if name.endswith(".segment")]
        if not names:
            return
        name = self.rnd.choice(names)
        file = folder.open(name, write=True)
        used = len(file.read(0, file.size()).rstrip(b"\0"))
        for _ in range(self.rnd.choice([1, 1, 3])):
            at = self.rnd.randrange(used)
            file.write(at, bytes([file.read(at, 1)[0] ^ 1 << self.rnd.randrange(8)]))
        file.close()
        rows, error = list[ROW](), None
        try:
            for record in scan(FOLDER, "jobs", disk=self._disk):
                rows.append(row_of(record))
        except (CorruptJournal, UnsupportedFormat) as caught:
            error = caught
        found, objection = until_error(read(FOLDER, "jobs", disk=self._disk))
        assert found == rows[: len(found)]
        assert type(objection) is type(error), (objection, error)
        if error is None:
            assert found == rows
        else:
            self.saw.add("damage")
        if isinstance(error, CorruptJournal) and isinstance(objection, CorruptJournal) and len(found) == len(rows):
            assert (objection.path, objection.offset) == (error.path, error.offset)
            self.saw.add("damage inside a segment")


def is_within(row: ROW, bounds: dict[str, Any]) -> bool:
    """Whether ``read`` with these bounds has the row."""
    micros = {
        name: value * 1000 if isinstance(value, int) else (value - _EPOCH) // timedelta(microseconds=1)
        for name, value in bounds.items()
        if name.endswith("time")
    }
    first_id, end_id = bounds.get("start_id", 0), bounds.get("end_id", 1 << 70)
    start, end = micros.get("start_time", 0), micros.get("end_time", 1 << 70)
    return bool(first_id <= row[0] < end_id and start <= row[1] < end)


def same(row: ROW, other: ROW) -> bool:
    """Whether two rows are one item: only its error count may have changed."""
    return row[:3] + row[4:] == other[:3] + other[4:]
