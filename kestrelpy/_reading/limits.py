"""The readers whose limits a put has to respect."""

from __future__ import annotations

from typing import Protocol

from kestrelpy._journal.format import Checkpoint
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._reading.backlog import done_before
from kestrelpy._reading.progress import Progress
from kestrelpy._reading.source import Source
from kestrelpy.config import ReaderConfig


class Limited(Protocol):
    """A reader whose limits a put has to respect: open here, or known by its checkpoint."""

    @property
    def name(self) -> str: ...

    @property
    def full_name(self) -> str: ...

    @property
    def config(self) -> ReaderConfig: ...

    @property
    def items(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    def counted(self) -> tuple[int, int]:
        """The items and bytes that count against the limits."""


def progress_of(state: Checkpoint, source: Source) -> Progress:
    """A checkpoint's progress. If a power cut destroyed items that the reader had done, only the others are counted."""
    progress = Progress.load(state)
    if source.is_gap(progress.head):
        progress.released_items, progress.released_bytes = done_before(source, progress, progress.head + 1)
    return progress


class OfflineReader:
    """A reader that is not open here. Its items are counted by its checkpoint, read again before a put is refused."""

    def __init__(self, files: QueueFiles, source: Source, name: str, config: ReaderConfig) -> None:
        self._files = files
        self._source = source
        self.name = name
        self.full_name = f"{files.queue}+{name}" if name else files.queue
        self.config = config
        self._released = (0, 0)
        self.refresh()

    def refresh(self) -> None:
        state = self._files.find(self.name, self._source.queue_id)  # logs nothing: the log may be this queue
        if state is None:
            self._released = self._source.before(self._source.first_id)
        else:
            progress = progress_of(state, self._source)
            self._released = (progress.released_items, progress.released_bytes)

    @property
    def items(self) -> int:
        return self._source.visible_id - self._source.missing - self._released[0]

    @property
    def bytes(self) -> int:
        return self._source.visible_bytes - self._released[1]

    def counted(self) -> tuple[int, int]:
        """All of them: whatever was open comes again."""
        return self.items, self.bytes


def shown_limits(config: ReaderConfig) -> str:
    """The limits of a reader, as its options, for messages."""
    limits = {"max_items": config.max_items, "max_bytes": config.max_bytes}
    return ", ".join(f"{name}={limit:,}" for name, limit in limits.items() if limit is not None)
