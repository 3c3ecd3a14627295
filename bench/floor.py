"""The floor: the least code that does the work of a durable put, get and commit in pure Python. A rival, not a queue.

It has no second segment, no reader, no limits, no waiting, no recovery: what a queue costs above it is their price.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

_HEADER = struct.Struct("<IQQII").pack
_CRC = struct.Struct("<I").pack
FRAME_BYTES = 32

Put = Callable[[bytes], int]
Take = Callable[[], tuple[int, bytes, int]]
Commit = Callable[[int], object]


def make_floor(path: Path, room: int) -> tuple[Put, Take, Commit, Callable[[], None]]:
    """A put, a get and a commit over one mapped file of ``room`` bytes, and what closes it."""
    with open(path, "wb") as file:
        file.write(bytes(room))
    with open(path, "r+b") as mapped:
        store = mmap.mmap(mapped.fileno(), room)
    lock = threading.Lock()
    items: deque[tuple[int, bytes, int]] = deque()
    opened: dict[int, tuple[int, bytes, int]] = {}
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

    def take() -> tuple[int, bytes, int]:
        with lock:
            item = items.popleft()
            opened[item[0]] = item
            return item

    def commit(item_id: int) -> object:
        with lock:
            return opened.pop(item_id)

    return put, take, commit, store.close
