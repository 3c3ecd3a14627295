"""The floors: the least code in pure Python that does a workload's work. Rivals, not queues.

Durable: put, get and commit over one mapped file, one by one and in batches, and the put that waits for the disk.
There is no second segment, no reader, no limits, no waiting, no recovery. In memory: a deque, and a line of locks for
those who wait; no limit, no timeout, no end. What a queue costs above its floor is the price of these.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

_HEADER = struct.Struct("<IQQII").pack
_CRC = struct.Struct("<I").pack
FRAME_BYTES = 32

Open = tuple[int, bytes, int]
"""An open read: id, data, and when it was added."""


class Floor(NamedTuple):
    """The calls of a durable floor. A batch is taken and committed as a list of open reads."""

    put: Callable[[bytes], int]
    take: Callable[[], Open]
    commit: Callable[[int], object]
    put_many: Callable[[Sequence[bytes]], object]
    take_many: Callable[[int], list[Open]]
    commit_many: Callable[[list[Open]], object]
    close: Callable[[], None]


def make_floor(path: Path, room: int) -> Floor:
    """A floor over one mapped file of ``room`` bytes."""
    store = _mapped(path, room)
    lock = threading.Lock()
    items: deque[Open] = deque()
    opened: dict[int, Open] = {}
    at = tail = 0
    now = time.time_ns

    def put(data: bytes) -> int:
        nonlocal at, tail
        with lock:
            item_id = tail + 1
            added_ms = now() // 1_000_000
            frame = _HEADER(len(data), item_id, added_ms, item_id, 0x11223344) + data
            end = at + 4 + len(frame)
            store[at:end] = _CRC(crc32(frame)) + frame
            at = end
            tail = item_id
            items.append((item_id, data, added_ms))
            return item_id

    def take() -> Open:
        with lock:
            item = items.popleft()
            opened[item[0]] = item
            return item

    def commit(item_id: int) -> object:
        with lock:
            return opened.pop(item_id)

    def put_many(batch: Sequence[bytes]) -> object:
        nonlocal at, tail
        with lock:
            count = len(batch)
            added_ms = now() // 1_000_000
            lengths = struct.pack(f"<{count}I", *map(len, batch))
            frame = _HEADER(count, tail + 1, added_ms, tail + count, 0x11223344) + lengths + b"".join(batch)
            end = at + 4 + len(frame)
            store[at:end] = _CRC(crc32(frame)) + frame
            at = end
            items.extend([(item_id, data, added_ms) for item_id, data in enumerate(batch, tail + 1)])
            tail += count
            return tail

    def take_many(count: int) -> list[Open]:
        with lock:
            taken = [items.popleft() for _ in range(min(count, len(items)))]
            opened.update([(item[0], item) for item in taken])
            return taken

    def commit_many(taken: list[Open]) -> object:
        with lock:
            for item in taken:
                del opened[item[0]]
            return None

    return Floor(put, take, commit, put_many, take_many, commit_many, store.close)


def _mapped(path: Path, room: int) -> mmap.mmap:
    """A mapping of a new file of zeros."""
    with open(path, "wb") as file:
        for at in range(0, room, 1 << 20):
            file.write(bytes(min(1 << 20, room - at)))
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), room)


def make_sync_floor(path: Path, room: int) -> tuple[Callable[[bytes], object], Callable[[], None]]:
    """A put that returns once its item is on disk, by one thread, and what closes the file."""
    store = _mapped(path, room)
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    sync = os.fdatasync
    at = 0

    def put(data: bytes) -> object:
        nonlocal at
        frame = _CRC(crc32(data)) + data
        end = at + len(frame)
        store[at:end] = frame
        at = end
        return sync(descriptor)

    def close() -> None:
        store.close()
        os.close(descriptor)

    return put, close


def make_memory_floor() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    """A put, and a take that waits. Who waits registers, then looks again: no item is there with nobody told of it."""
    items: deque[Any] = deque()
    waiting: deque[Any] = deque()

    def put(item: Any) -> None:
        items.append(item)
        if waiting:
            with suppress(IndexError):  # the consumer was faster
                waiting.popleft().release()

    def take() -> Any:
        try:
            return items.popleft()
        except IndexError:
            return wait()

    def wait() -> Any:
        while True:
            mine = threading.Lock()
            mine.acquire()
            waiting.append(mine)
            if not items:
                mine.acquire()
            else:
                with suppress(ValueError):  # a producer was faster
                    waiting.remove(mine)
            with suppress(IndexError):  # another one was faster
                return items.popleft()

    return put, take
