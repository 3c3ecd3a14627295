"""The history of a simulated file and of a simulated folder: what processes see, what is durable, and pending changes.

Rules:
1. A file has the state that processes see (``size``, ``pages``), the durable state, and the changes since its last
   successful sync, in order. A page has 4096 bytes and is an immutable ``bytes``. A page that is not in the dict is
   zero. So a clone of a file copies pointers, and a file copies a shared dict of pages before it changes a page.
2. Syncing a file makes its content and its size durable, but not its name. Syncing a folder makes the names in it
   durable, but not the content of files. A folder is a name in its parent.
3. A failed sync marks the pages as clean. Processes see them as before, but they are not on disk. A later successful
   sync does not write them, unless they were stored into again (a kernel writes whole pages). ``forget()`` shows what
   the disk has. Sizes, truncates and names are no pages: after a failed sync they stay pending. Every other handle of
   the file gets the error once, at its next sync.
4. A power cut may leave the last block as it was written, together with the size from before. The bytes after that size
   are a ``ghost``: no process sees them. The ghost is gone when the block is written again.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple, cast

from kestrelpy._disk.memory import Folder, MemoryLock, Node

PAGE = 4096
ZERO_PAGE = bytes(PAGE)


class PageChange(NamedTuple):
    """A page as one operation left it. It changed the bytes ``start`` to ``stop``. ``cut``: it was a truncate."""

    order: int
    page: int
    content: bytes
    start: int
    stop: int
    cut: bool


class NameChange(NamedTuple):
    """A name as one operation left it. ``moved``: the other half of the operation is in another folder."""

    order: int
    name: str
    node: CrashingNode | None
    moved: bool


class CrashingNode:
    """A file with its history."""

    __slots__ = (
        "changes",
        "doubtful",
        "durable_pages",
        "durable_size",
        "failed_syncs",
        "ghost",
        "holder",
        "pages",
        "shared",
        "size",
        "sizes",
    )

    def __init__(
        self, size: int = 0, pages: dict[int, bytes] | None = None, ghost: tuple[int, bytes] | None = None
    ) -> None:
        """Make a file that is durable as a whole. The caller keeps ``pages``; this file does not change them."""
        self.holder: weakref.ref[MemoryLock] | None = None
        self.size = size
        self.pages = {} if pages is None else pages
        self.shared = True
        """True if another object may use ``pages`` too. Then it is copied before a change."""
        self.durable_size = size
        self.durable_pages = self.pages
        """This dict is replaced, never changed, because clones and power states share it."""
        self.sizes: list[tuple[int, int]] = []
        """Pending sizes: order and size."""
        self.changes: list[PageChange] = []
        """Pending pages. A failed sync marked the first ``doubtful`` of them as clean."""
        self.doubtful = 0
        self.failed_syncs = 0
        self.ghost = ghost
        """The last page and its block on the disk, if the block has bytes other than zero after ``durable_size``."""

    def clone(self) -> CrashingNode:
        """A copy without the lock."""
        self.shared = True
        twin = CrashingNode(self.size, self.pages, self.ghost)
        twin.durable_size = self.durable_size
        twin.durable_pages = self.durable_pages
        twin.sizes = self.sizes.copy()
        twin.changes = self.changes.copy()
        twin.doubtful = self.doubtful
        return twin

    def read(self, offset: int, size: int) -> bytes:
        end = min(offset + size, self.size)
        if offset >= end:
            return b""
        first, last = offset // PAGE, (end - 1) // PAGE
        get = self.pages.get
        if first == last:
            return get(first, ZERO_PAGE)[offset - first * PAGE : end - first * PAGE]
        data = b"".join([get(page, ZERO_PAGE) for page in range(first, last + 1)])
        return data[offset - first * PAGE : end - first * PAGE]

    def store(self, offset: int, data: bytes, order: int) -> None:
        end = offset + len(data)
        if not data:
            return
        if end > self.size:
            self.resize(end, order)
        at = offset
        while at < end:
            page, start = divmod(at, PAGE)
            stop = min(PAGE, start + end - at)
            old = self.pages.get(page, ZERO_PAGE)
            new = old[:start] + data[at - offset : at - offset + stop - start] + old[stop:]
            self._put(PageChange(order, page, new, start, stop, False))
            at += stop - start

    def resize(self, size: int, order: int) -> None:
        if size < self.size:
            keep, rest = divmod(size, PAGE)
            known = self.pages.keys() | self.durable_pages.keys() | {change.page for change in self.changes}
            for page in sorted(page for page in known if page >= keep):
                start = rest if page == keep else 0
                new = self.pages.get(page, ZERO_PAGE)[:start] + ZERO_PAGE[start:]
                self._put(PageChange(order, page, new, start, PAGE, True))
        if size != self.size:
            self.size = size
            self.sizes.append((order, size))

    def _put(self, change: PageChange) -> None:
        if self.shared:
            self.pages = self.pages.copy()
            self.shared = False
        put_page(self.pages, change.page, change.content)
        self.changes.append(change)

    def sync(self) -> None:
        if self.ghost is not None and (
            self.sizes or any(change.page == self.ghost[0] for change in self.changes[self.doubtful :])
        ):
            self.ghost = None
        if self.doubtful:
            self._sync_around_doubts()
        else:
            self.durable_pages = self.pages
            self.shared = True
            self.changes = []
        self.durable_size = self.size
        self.sizes = []

    def _sync_around_doubts(self) -> None:
        """Make pages durable that changed since the failed sync, and truncates, which need no page to be written."""
        durable = self.durable_pages.copy()
        changed = {change.page for change in self.changes[self.doubtful :]}
        left: list[PageChange] = []
        for change in self.changes[: self.doubtful]:
            if change.cut and change.page not in changed:
                put_page(durable, change.page, change.content)
                left = [other for other in left if other.page != change.page]
            elif change.page not in changed:
                left.append(change)
        for page in changed:
            put_page(durable, page, self.pages.get(page, ZERO_PAGE))
        self.durable_pages = durable
        self.changes = left
        self.doubtful = len(left)

    def fail_sync(self) -> None:
        self.doubtful = len(self.changes)
        self.failed_syncs += 1

    def forget(self) -> None:
        """Read pages again that a failed sync marked as clean: the disk has their old content. Dirty pages stay."""
        if not self.doubtful:
            return
        dirty = {change.page for change in self.changes[self.doubtful :]}
        clean: dict[int, bytes] = {}
        left: list[PageChange] = []
        for change in self.changes[: self.doubtful]:
            if change.page in dirty or change.cut:
                left.append(change)
            if change.cut:
                clean[change.page] = change.content
            else:
                clean.setdefault(change.page, self.durable_pages.get(change.page, ZERO_PAGE))
        self.changes[: self.doubtful] = left
        self.doubtful = len(left)
        self.pages = self.pages.copy()
        self.shared = False
        for page in clean.keys() - dirty:
            put_page(self.pages, page, clean[page])

    def _check(self) -> None:
        """Assert the invariants that hold after every operation."""
        for size, pages in ((self.size, self.pages), (self.durable_size, self.durable_pages)):
            assert all(len(content) == PAGE and content != ZERO_PAGE for content in pages.values())
            assert all(
                page * PAGE < size and not content[size - page * PAGE :].strip(b"\0") for page, content in pages.items()
            )
        assert 0 <= self.doubtful <= len(self.changes)
        changed = {change.page for change in self.changes}
        for page in self.pages.keys() | self.durable_pages.keys():
            assert page in changed or self.pages.get(page) == self.durable_pages.get(page)
        assert self.sizes or self.size == self.durable_size
        orders = [change.order for change in self.changes]
        assert orders == sorted(orders)


def put_page(pages: dict[int, bytes], page: int, content: bytes) -> None:
    """Set a page. Zero pages are not kept, so that equal files have equal dicts."""
    if content == ZERO_PAGE:
        pages.pop(page, None)
    else:
        pages[page] = content


class CrashingFolder(Folder):
    """A folder with its history."""

    __slots__ = ("changes", "doubtful", "durable", "made", "settled")

    def __init__(self, path: str, mount: str, made: int, settled: set[int]) -> None:
        """``made``: the order of the operation that made the folder; 0 if its own name is durable."""
        super().__init__(path, mount)
        self.made = made
        self.durable: dict[str, CrashingNode] = {}
        self.changes: list[NameChange] = []
        """Pending names. A sync of the first ``doubtful`` of them failed."""
        self.doubtful = 0
        self.settled = settled
        """The disk's set of moves that have one durable half."""

    def set(self, name: str, node: Node | None, order: int, *, moved: bool = False) -> None:
        super().set(name, node, order)
        self.changes.append(NameChange(order, name, cast("CrashingNode | None", node), moved))

    def sync(self) -> None:
        fresh = self.changes[self.doubtful :]
        for change in fresh:
            put_name(self.durable, change)
            if change.moved:
                self.settled.add(change.order)
        names = {change.name for change in fresh}
        self.changes = [change for change in self.changes[: self.doubtful] if change.name not in names]
        self.doubtful = len(self.changes)

    def fail_sync(self) -> None:
        """Pending names stay pending, even if a later sync succeeds. A name that changes again is synced as usual."""
        self.doubtful = len(self.changes)


def put_name(names: dict[str, CrashingNode], change: NameChange) -> None:
    if change.node is None:
        names.pop(change.name, None)
    else:
        names[change.name] = change.node
