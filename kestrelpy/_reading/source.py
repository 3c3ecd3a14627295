"""What a reader needs of where its items come from: the interface between readers and the two kinds of source.

``LocalSource`` is the source in the process that writes the queue, ``DetachedSource`` the one in any other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from kestrelpy._disk.interface import Directory
from kestrelpy._journal.format import Checkpoint, Entry
from kestrelpy._journal.segment import FramePosition
from kestrelpy._journal.view import Block

if TYPE_CHECKING:
    from kestrelpy._reading.dispatch import Taking
    from kestrelpy._reading.reader import Reader
    from kestrelpy.clock import Clock

Take = Callable[[int, None], Entry | None]
"""How to take an item out of memory by its id: ``None`` if it is not there."""


class Served(Protocol):
    """Whom a producer has to look after: a reader with somebody in line, mostly."""

    def _hand_off(self) -> None: ...


class Source(Protocol):
    """Where a reader's items come from: a queue in this process, or the files of one that another process writes."""

    name: str
    clock: Clock
    waiting: dict[Served, None]
    knows_heads: bool
    """Whether what is retired is decided in this process, which sees where its readers are; elsewhere only what they
    have saved is seen.
    """

    @property
    def visible_id(self) -> int:
        """The last id that readers may see."""

    @property
    def seen_id(self) -> int:
        """As ``visible_id`` was known to be when it was looked at last: for who has more than enough up to it."""

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

    def window(self, reader: Taking) -> Take | None:
        """How to take from the shared window, if the reader's next item is or will be in it. Called under its lock."""

    def look_again(self) -> None:
        """With the guard held, before a reader is made: what was seen without it may have gone."""

    def attach(self, reader: Taking) -> None:
        """The reader has read all there is: let it share the window. Called without its lock."""

    def detach(self, reader: Reader) -> None:
        """The reader is closed. Called without its lock."""

    def make_durable(self, item_id: int) -> None:
        """Return when ``item_id`` is on disk (R4)."""

    def guard(self) -> AbstractContextManager[None]:
        """Held while nothing may be retired. Asked for with no lock held but that of a reader's checkpoints."""

    def save(self, reader: Reader, state: Checkpoint, durable: bool) -> None: ...

    def moved(self, reader: Taking) -> None:
        """Something was released: see to a checkpoint before long, and to producers who wait for room."""

    def polls(self, reader: Taking) -> None:
        """Somebody is in line now: a source that nobody wakes has to look by itself."""

    def decode(self, data: bytes) -> Any: ...

    def closed_reader(self, reader: Reader) -> None: ...
