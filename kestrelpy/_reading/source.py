"""What a reader needs from its source of items: the interface between readers and the two kinds of source.

``LocalSource`` is the source in the process that writes the queue, ``DetachedSource`` the one in any other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from kestrelpy._disk.interface import Directory, Disk
from kestrelpy._journal.format import Checkpoint, Entry
from kestrelpy._journal.segment import FramePosition
from kestrelpy._journal.view import Block, JournalView
from kestrelpy._reading.progress import Progress
from kestrelpy._reading.window import WindowBatch

if TYPE_CHECKING:
    import threading

    from kestrelpy.clock import Clock
    from kestrelpy.config import ReaderConfig


Take = Callable[[int, None], Entry | None]
"""Takes an item out of memory by its id; returns ``None`` if it is not there."""


class Served(Protocol):
    """What a producer has to serve after a put: mostly a reader with waiters in line."""

    def hand_off(self) -> None:
        """Give items to the waiters in line, as far as there are items."""


class Cursor(Protocol):
    """What a source sees of a reader's backlog: its progress, and its items in memory. Guarded by ``lock``."""

    lock: threading.Lock
    progress: Progress
    config: ReaderConfig
    ahead: dict[int, Entry]
    batch: WindowBatch | None
    hint: tuple[int, FramePosition] | None
    take: Take
    broken: Exception | None

    def expand(self) -> Take | None:
        """Make entries of the next items of ``batch``, and return how to take them; ``None`` if it is used up."""


class Source(Protocol):
    """Where a reader's items come from: a queue in this process, or the files of one that another process writes."""

    name: str
    clock: Clock
    disk: Disk | None
    """Where the folder is; ``None`` if nobody else can open queues there."""
    waiting: dict[Served, None]
    knows_heads: bool
    """Whether segments are retired by this process, which sees the heads of its readers. Another process sees only what
    readers have saved.
    """

    @property
    def view(self) -> JournalView:
        """The journal, for reading."""

    @property
    def visible_id(self) -> int:
        """The last id that readers may see."""

    @property
    def seen_id(self) -> int:
        """``visible_id`` as of the last look at it: for a caller that has enough items up to there."""

    @property
    def missing(self) -> int:
        """How many ids up to ``visible_id`` have no item."""

    @property
    def visible_bytes(self) -> int:
        """Bytes of all items ever put, up to ``visible_id``."""

    @property
    def first_id(self) -> int:
        """The earliest id that is kept."""

    @property
    def queue_id(self) -> bytes: ...

    @property
    def directory(self) -> Directory:
        """Where the queue's files are."""

    @property
    def durable_id(self) -> int: ...

    def read(self, item_id: int, last_id: int, max_bytes: int, hint: tuple[int, FramePosition] | None) -> Block: ...

    def is_gap(self, item_id: int) -> bool: ...

    def before(self, item_id: int) -> tuple[int, int]: ...

    def find_time(self, time_ms: int, last_id: int) -> int: ...

    def hint(self, item_id: int) -> tuple[int, FramePosition]: ...

    def window(self, cursor: Cursor) -> Take | None:
        """How to take from the shared window, if the reader's next item is or will be in it; else ``None``. Called with
        the reader's lock held.
        """

    def look_again(self) -> None:
        """Called with the guard held, before a reader is made: what was seen without the guard may be gone."""

    def attach(self, cursor: Cursor) -> None:
        """The reader has read all items: let it share the window. Called without the reader's lock."""

    def detach(self, cursor: Cursor) -> None:
        """The reader is closed. Called without the reader's lock."""

    def make_durable(self, item_id: int) -> None:
        """Return when ``item_id`` is on disk (R4)."""

    def guard(self) -> AbstractContextManager[None]:
        """Held while nothing may be retired. Taken with no other lock held, except that of a reader's checkpoints."""

    def save(self, reader: Any, state: Checkpoint, durable: bool) -> None:
        """Write a checkpoint of this ``Reader``."""

    def moved(self) -> None:
        """Items were released: save a checkpoint before long, and notify producers that wait for room."""

    def polls(self) -> None:
        """A waiter is in line now: a source that nobody wakes has to poll."""

    def decode(self, data: bytes) -> Any: ...

    def configured(self, reader: Any, config: ReaderConfig) -> None:
        """This ``Reader`` has other limits now. Called without its lock."""

    def closed_reader(self, reader: Any) -> None:
        """This ``Reader`` has closed: release what was opened for it."""
