"""``Growth``: what a journal asks before it takes more of the disk.

Rules:
1. It is asked where a file grows or begins, so once for up to a megabyte: a put that fits into what is taken already
   asks nobody.
2. No segment is larger than half of the limit, so the newest closed segment, which always stays, and the next one have
   room together. So when all readers have read everything, there is room for any put that is accepted at all.

NOTE ON LOCKING: none of its own. ``allow`` and ``check_alone`` are called with the queue's lock held (Q in
docs/locking.md), and so is ``has_room``. The limits are replaced by one store each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kestrelpy._journal.format import FOOTER_BYTES, HEADER_BYTES, LARGEST
from kestrelpy.errors import QueueFull

if TYPE_CHECKING:
    from kestrelpy._journal.segment import Segment
    from kestrelpy._journal.view import JournalView


class JournalFull(QueueFull):
    """The journal may not grow by so much. ``is_hopeless``: an empty journal would refuse it, too."""

    def __init__(self, message: str, *, is_hopeless: bool = False) -> None:
        super().__init__(message)
        self.is_hopeless = is_hopeless


class Growth:
    """The limits of one journal.

    ``max_bytes``: of all segment files together, those included that are retired and not yet gone. ``max_total``: the
    journal refuses to grow once the bytes of all items ever put are more than this: a reader would be too far behind.
    ``on_followed``: called when a segment was begun after another one, which may be retired some day; if it raises, the
    put fails. ``left``: the segments that are retired and not yet gone.
    """

    __slots__ = ("is_suspended", "left", "max_bytes", "max_total", "on_followed", "wanted")

    def __init__(self) -> None:
        self.max_bytes: int | None = None
        self.max_total = LARGEST
        self.is_suspended = False
        """A batch of the inbox is being ingested: it had room when it was begun, and must be finished."""
        self.on_followed: Callable[[], object] = bool
        self.left: Callable[[], Iterable[Segment]] = tuple
        self.wanted = 0
        """The bytes that the last refusal was about."""

    def taken(self, journal: JournalView) -> int:
        """What the journal has on the disk, in bytes: ``QueueStats.journal_bytes``. Cost: O(segments)."""
        return sum(each.size for each in journal.segments) + sum(each.size for each in self.left())

    def excess(self, journal: JournalView) -> int:
        """How many bytes must go, so that what was refused last has room."""
        return 0 if self.max_bytes is None else self.taken(journal) + self.wanted - self.max_bytes

    def allow(self, journal: JournalView, least: int, most: int) -> int:
        """How many bytes the journal may grow by: ``most`` if there is room, but at least ``least``.

        Raises ``JournalFull`` if there is no room for these.
        """
        if self.is_suspended:
            return most
        if journal.total_bytes > self.max_total:
            raise JournalFull("a reader of the queue is too far behind")
        if self.max_bytes is None:
            return most
        room = self.max_bytes - self.taken(journal)
        if room < least:
            self.wanted = least
            raise JournalFull(f"the journal has no room (max_journal_bytes={self.max_bytes:,})")
        return min(room, most)

    def check_alone(self, frame_bytes: int) -> None:
        """Raise ``JournalFull`` if a frame that gets a segment of its own would be larger than any segment may be."""
        if self.max_bytes is not None and HEADER_BYTES + frame_bytes + FOOTER_BYTES > self.max_bytes // 2:
            limit = f"max_journal_bytes={self.max_bytes:,}, of which one put may take half"
            raise JournalFull(f"{frame_bytes:,} bytes at once never fit into the journal ({limit})", is_hopeless=True)

    def has_room(self, journal: JournalView, size: int) -> bool:
        """Whether there is room for so many bytes of frames, however they fall into segments of the usual size."""
        if journal.total_bytes > self.max_total:
            return False
        if self.max_bytes is None:
            return True
        self.wanted = size
        return self.taken(journal) + size <= self.max_bytes
