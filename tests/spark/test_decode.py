"""Bytes to columns: the same items as the core finds, whatever the bytes are."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from kestrelpy import CorruptJournal, JournaledQueue
from kestrelpy._journal import format as fmt
from kestrelpy.arrow import decode as decoding
from kestrelpy.arrow.columns import ARROW_SCHEMA, LAST_MS, MOST_ROWS, Columns
from kestrelpy.arrow.decode import NEVER, Run, decode
from kestrelpy.spark.read.batch import BatchReader
from kestrelpy.testing import ManualClock
from tests.spark.journals import read_part, rows_of
from tests.support.budget import share
from tests.support.journals import ROW, fill, scanned
from tests.support.queues import let_die

Open = Callable[..., JournaledQueue]
MARKER = 0x80FF1101
FIRST_ID = 41
SCHEMA = from_arrow_schema(ARROW_SCHEMA)


# -- frames ----------------------------------------------------------------------------------------------------------


def some_frames(rnd: random.Random, count: int) -> list[bytes]:
    """Valid frames of all kinds, one behind the other; in some payloads there are markers and whole frames."""
    frames, item_id = list[bytes](), FIRST_ID
    plain = rnd.random() < 0.3
    size = rnd.randrange(50)
    for _ in range(count):
        payload = rnd.randbytes(size if plain else rnd.choice([0, 1, 7, rnd.randrange(60)]))
        if not plain and rnd.random() < 0.2:
            payload += rnd.choice(
                [fmt.pack_crc(MARKER), bytes(28) + fmt.pack_crc(MARKER), frames[0] if frames else b""]
            )
        expires_ms = None if plain or rnd.random() < 0.7 else rnd.choice([0, 5, 1 << 63, (1 << 64) - 1])
        added_ms, durable_id = rnd.randrange(1 << 48), rnd.randrange(item_id)
        durable_id = max(durable_id, item_id - (1 << 32) + 1)
        if plain or rnd.random() < 0.8:
            frames.append(fmt.encode_item(item_id, payload, added_ms, expires_ms, durable_id, MARKER))
            item_id += 1
        else:
            items = [rnd.randbytes(rnd.choice([0, 3])) for _ in range(rnd.randrange(1, 5))] + [payload]
            frames.append(
                fmt.encode_batch(item_id, items, list(map(len, items)), added_ms, expires_ms, durable_id, MARKER)
            )
            item_id += len(items)
    return frames


def damaged(rnd: random.Random, frames: list[bytes]) -> bytes:
    """The bytes of the frames after something has happened to them."""
    frames = list(frames)
    what = rnd.randrange(8)
    if what == 0:
        del frames[rnd.randrange(len(frames))]
    elif what == 1:
        frames.insert(rnd.randrange(len(frames)), rnd.choice(frames))
    elif what == 2:
        frames.insert(rnd.randrange(len(frames)), bytes(rnd.randrange(100)))
    elif what == 3:  # a batch that says what it is not, with a checksum that is right
        body = rnd.choice(
            [b"", b"\1\0\0", b"\0" * 4, b"\1\0\0\0\5\0\0\0abc", b"\xff" * 8, b"\2\0\0\0\1\0\0\0\1\0\0\0a"]
        )
        stamp = rnd.choice([2, 3, 1, 4, 8, 9]) << fmt.KIND_SHIFT
        at = rnd.randrange(len(frames))
        frame = fmt.decode_frame(frames[at], 0, MARKER)
        assert frame is not None
        frames[at] = fmt._seal(fmt.pack_frame(len(body), frame.first_id, stamp, 0, MARKER) + body)
    elif what == 4:
        frames.append(fmt.encode_footer(fmt.SegmentFooter(1, 9, 9, 9, 9, 9, 999), 1, MARKER))
    data = bytearray(b"".join(frames))
    if what >= 5 and data:
        for _ in range(rnd.choice([1, 1, 2, 5])):
            data[rnd.randrange(len(data))] ^= 1 << rnd.randrange(8)
    if data and rnd.random() < 0.3:
        del data[rnd.randrange(len(data)) :]
    if rnd.random() < 0.3:
        data += bytes(rnd.randrange(200))
    return bytes(data)


def one_by_one(data: bytes) -> tuple[list[tuple[bytes, int, int | None]], int]:
    """What the core makes of it: items, and where they end."""
    entries: list[tuple[bytes, int, int | None]] = []
    at, due = 0, FIRST_ID
    while (frame := fmt.decode_frame(data, at, MARKER)) is not None and frame.footer is None and frame.first_id == due:
        entries += frame.entries
        at, due = at + frame.size, frame.last_id + 1
    return entries, at


def decoded(data: bytes) -> tuple[list[tuple[bytes, int, int | None]], int]:
    """What ``decode`` makes of it."""
    entries: list[tuple[bytes, int, int | None]] = []
    at = 0
    while (run := decode(data[at:], MARKER, FIRST_ID + len(entries))).end:
        entries += entries_of(run, data[at:])
        at += run.end
    return entries, at


def entries_of(run: Run, data: bytes) -> list[tuple[bytes, int, int | None]]:
    expires: list[int | None] = [None] * len(run.starts)
    if run.expires_ms is not None:
        expires = [None if each == NEVER else int(each) for each in run.expires_ms]
    starts, sizes, added = run.starts.tolist(), run.sizes.tolist(), run.added_ms.tolist()
    pieces = [data[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    return list(zip(pieces, added, expires, strict=True))


def never_is_none(entries: list[tuple[bytes, int, int | None]]) -> list[tuple[bytes, int, int | None]]:
    """The last instant that a frame can say is taken for none."""
    return [(data, added_ms, None if expires_ms == NEVER else expires_ms) for data, added_ms, expires_ms in entries]


def test_decoding_is_what_the_core_decodes() -> None:
    rnd = random.Random(1)
    whole = 0
    for _ in range(share(3000)):
        frames = some_frames(rnd, rnd.choice([1, 2, 5, 40]))
        data = b"".join(frames) if rnd.random() < 0.3 else damaged(rnd, frames)
        entries, end = one_by_one(data)
        assert decoded(data) == (never_is_none(entries), end)
        whole += end == len(data)
    assert whole


def test_decoding_ends_inside_a_frame_at_every_byte() -> None:
    frames = some_frames(random.Random(5), 25)
    data = b"".join(frames)
    for size in range(len(data) + 1):
        entries, end = one_by_one(data[:size])
        assert decoded(data[:size]) == (never_is_none(entries), end)


def test_no_flipped_bit_is_overlooked() -> None:
    """In a run of equal frames, and in one of others, each of which is checked by one checksum over all of it."""
    for sizes in ([9] * 20, list(range(20))):
        frames = [fmt.encode_item(FIRST_ID + at, b"x" * size, 7, None, 0, MARKER) for at, size in enumerate(sizes)]
        data = bytearray(b"".join(frames))
        for at in range(len(data)):
            data[at] ^= 1 << at % 8
            begun = sum(sum(map(len, frames[:count])) <= at for count in range(1, len(frames) + 1))
            assert len(decode(bytes(data), MARKER, FIRST_ID).starts) == begun
            data[at] ^= 1 << at % 8


def test_one_checksum_says_what_many_say() -> None:
    rnd = random.Random(9)
    for _ in range(share(300)):
        frames = some_frames(rnd, 30)
        starts = np.cumsum([0, *map(len, frames[:-1])])
        data = bytearray(b"".join(frames))
        heads = np.array([frame[: fmt.FRAME_BYTES] for frame in frames], f"V{fmt.FRAME_BYTES}").view(decoding._HEAD)
        assert decoding._is_intact(bytes(data), starts, heads)
        for _ in range(rnd.randrange(1, 4)):  # bodies only: the heads were read before
            number = rnd.randrange(len(frames))
            at = int(starts[number]) + rnd.choice([8, 12, 20, len(frames[number]) - 1])
            data[at] ^= rnd.randrange(1, 256)
        intact = decoding._intact(bytes(data), starts, heads) == len(frames)
        assert decoding._is_intact(bytes(data), starts, heads) == intact


def test_a_marker_that_overlaps_itself() -> None:
    marker = 0x11111111
    frames = [fmt.encode_item(FIRST_ID + at, b"\x11" * at, 7, None, 0, marker) for at in range(60)]
    data = b"".join(frames)
    run = decode(data, marker, FIRST_ID)
    assert (len(run.starts), run.end) == (60, len(data))


# -- columns ---------------------------------------------------------------------------------------------------------


def run_over(items: list[bytes], gap: int) -> tuple[Run, bytes]:
    data = b"".join(bytes(gap) + item for item in items)
    sizes = np.array([len(item) for item in items], np.int64)
    starts = np.cumsum(sizes + gap) - sizes
    return Run(7, np.arange(len(items)) + 1000, None, starts, sizes, len(data)), data


@pytest.mark.parametrize("gap", [0, 32])
@pytest.mark.parametrize("items", [[b""], [b"", b""], [b"a"], [b"ab", b"cd", b"ef"], [b"a", b"", b"bcd", b""]])
def test_data_is_packed(items: list[bytes], gap: int) -> None:
    run, data = run_over(items, gap)
    columns = Columns("jobs", "s", {8: 3, 900: 4})
    rows = rows_of(columns.batches(run, data, slice(None)))
    assert [row[4] for row in rows] == items
    assert [row[3] for row in rows] == [3 if row[0] == 8 else 0 for row in rows]
    chosen = np.arange(0, len(items), 2)
    assert [row[0] for row in rows_of(columns.batches(run, data, chosen))] == [7 + at for at in chosen]


def test_batches_are_cut_by_rows_and_bytes() -> None:
    columns = Columns("jobs", "s", {})
    many = Run(1, *(np.zeros(MOST_ROWS + 5, np.int64),), None, *(np.zeros(MOST_ROWS + 5, np.int64),) * 2, 0)
    assert [batch.num_rows for batch in columns.batches(many, b"", slice(None))] == [MOST_ROWS, 5]
    run, data = run_over([bytes(7 << 20)] * 5, 0)
    assert [batch.num_rows for batch in columns.batches(run, data, slice(None))] == [2, 2, 1]


def test_an_expiry_beyond_what_spark_can_show_is_its_last_instant() -> None:
    run, data = run_over([b"a", b"b", b"c"], 0)
    run = run._replace(expires_ms=np.array([1 << 63, NEVER, 12], np.uint64))
    rows = rows_of(Columns("jobs", "s", {}).batches(run, data, slice(None)))
    assert [row[2] for row in rows] == [LAST_MS * 1000, None, 12_000]


def test_an_item_too_large_for_a_cell_is_refused() -> None:
    run = Run(7, np.zeros(1, np.int64), None, np.zeros(1, np.int64), np.array([1 << 31]), 0)
    with pytest.raises(ValueError, match="item 7 has 2,147,483,648 bytes: a cell of a DataFrame holds less than 2 GiB"):
        list(Columns("jobs", "s", {}).batches(run, b"", slice(None)))


# -- journals --------------------------------------------------------------------------------------------------------


def read_all(folder: Path, **options: Any) -> list[ROW]:
    """Everything that a batch read of the queue shows, part by part."""
    reader = BatchReader({"path": str(folder), "queue": "jobs", **options}, SCHEMA)
    return [row for part in reader.partitions() for row in read_part(part)[0]]


def test_a_journal_of_everything_is_read_as_scan_reads_it(folder: Path, open_queue: Open, clock: ManualClock) -> None:
    rnd = random.Random(2)
    queue = open_queue(segment_bytes=64 << 10)
    for _ in range(5):
        fill(queue, rnd, 300)
        clock.advance(1)
    for _ in range(3):
        item = queue.get()
        item.abort()
    queue.checkpoint()
    assert read_all(folder) == scanned(folder)
    queue.close()
    assert [row[3] for row in read_all(folder)[:2]] == [3, 0]
    assert read_all(folder, minPartitionBytes="1") == scanned(folder)


def test_large_items_and_empty_ones(folder: Path, open_queue: Open) -> None:
    queue = open_queue(segment_bytes=32 << 20)
    sizes = [0, 10_000_000, 1, 10_000_000, 5_000_000, 0, 300_000]
    for size in sizes:
        queue.put(random.Random(size).randbytes(size))
    queue.put_many([bytes(6_000_000)] * 3)
    rows = read_all(folder)
    assert rows == scanned(folder)
    assert [len(row[4]) for row in rows] == [*sizes, *[6_000_000] * 3]


def test_an_empty_queue_and_empty_segments(folder: Path, open_queue: Open) -> None:
    open_queue().close()
    assert read_all(folder) == []
    open_queue().close()
    queue = open_queue()
    queue.put(b"a")
    assert [row[4] for row in read_all(folder)] == [b"a"]


def test_archived_segments_come_too(folder: Path, open_queue: Open, tmp_path: Path) -> None:
    queue = open_queue(segment_bytes=4096, archive_dir=tmp_path / "archive")
    fill(queue, random.Random(3), 200)
    items = queue.get_many(60)
    queue.commit_many(items)
    queue.checkpoint()
    queue.close()
    archive = str(tmp_path / "archive")
    assert list((tmp_path / "archive").iterdir())
    assert read_all(folder, archive=archive) == scanned(folder, archive_dir=archive)
    assert len(read_all(folder)) < len(read_all(folder, archive=archive))


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "left by a crash"])
def test_damage_is_what_scan_says_it_is(folder: Path, open_queue: Open, closed: bool) -> None:
    rnd = random.Random(4)
    queue = open_queue(segment_bytes=4096, sync="never")
    fill(queue, rnd, 150, largest=100)
    queue.sync()
    fill(queue, rnd, 8, largest=100)
    let_die(queue)
    if closed:
        open_queue().close()
    paths = sorted(folder.glob("*.segment"))
    outcomes, rounds = set(), share(250)
    for _ in range(rounds):
        path = rnd.choice([rnd.choice(paths), paths[-1]])
        data = path.read_bytes()
        changed = bytearray(data)
        for _ in range(rnd.choice([1, 1, 3])):
            changed[rnd.randrange(len(data.rstrip(b"\0")))] ^= 1 << rnd.randrange(8)
        if rnd.random() < 0.2:
            del changed[rnd.randrange(len(changed)) :]
        path.write_bytes(changed)
        ours, theirs = outcome(lambda: read_all(folder)), outcome(lambda: scanned(folder))
        assert ours == theirs
        outcomes.add(ours[1:])
        path.write_bytes(data)
    assert len(outcomes) > rounds // 12
    assert read_all(folder) == scanned(folder)


def outcome(read: Callable[[], list[ROW]]) -> tuple[object, ...]:
    """Rows, or the error with what it says."""
    try:
        return ("rows", tuple(read()))
    except CorruptJournal as error:
        return ("error", error.path, error.offset, error.reason, error.item_id)


def test_rows_in_front_of_damage_come_first(folder: Path, open_queue: Open) -> None:
    queue = open_queue()
    for number in range(100):
        queue.put(b"%d" % number)
    queue.close()
    (path,) = folder.glob("*.segment")
    data = bytearray(path.read_bytes())
    data[fmt.HEADER_BYTES + 10 * (fmt.FRAME_BYTES + 1) + 45 * (fmt.FRAME_BYTES + 2) + fmt.FRAME_BYTES] ^= 1
    path.write_bytes(data)
    (part,) = BatchReader({"path": str(folder)}, SCHEMA).partitions()
    batches = part.batches()
    rows: list[ROW] = []
    with pytest.raises(CorruptJournal, match="item 56 is not intact here") as caught:
        rows.extend(row for batch in batches for row in rows_of([batch]))
    assert caught.value.item_id == 56
    assert [row[4] for row in rows] == [b"%d" % number for number in range(55)]


def test_the_end_of_what_a_writer_writes_is_no_damage(folder: Path, open_queue: Open) -> None:
    queue = open_queue(segment_bytes=1 << 20)
    for number in range(2000):
        queue.put(b"%d" % number)
        if number % 100 == 0:
            assert len(read_all(folder)) == number + 1
