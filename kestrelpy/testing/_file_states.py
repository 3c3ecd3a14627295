"""The states of one file that a power cut may leave, and damage. ``_power.py`` says which is legal when, and why."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TypeAlias

from kestrelpy.testing._choices import Choose
from kestrelpy.testing._history import PAGE, ZERO_PAGE, CrashingNode, PageChange, put_page

SECTOR = 512
Stale: TypeAlias = Callable[[], Sequence[bytes]]
"""Returns pages that a new block may hold from its last owner. Called only if garbage is needed."""
_NOISE = random.Random(4096).randbytes(PAGE)
_ONES = b"\xff" * PAGE


class Content:
    """The whole content of a file, and of its last block after the end of the file. Its pages never change."""

    __slots__ = ("_key", "ghost", "pages", "size")

    def __init__(self, size: int, pages: dict[int, bytes], ghost: tuple[int, bytes] | None = None) -> None:
        self.size = size
        self.pages = pages
        self.ghost = ghost
        """As ``CrashingNode.ghost``."""
        self._key: int | None = None

    def key(self) -> int:
        if self._key is None:
            self._key = hash((self.size, frozenset(self.pages.items()), self.ghost))
        return self._key


class FileStates:
    """The states that a power cut may leave of one file."""

    def __init__(self, node: CrashingNode) -> None:
        self._durable_size = node.durable_size
        self._durable = node.durable_pages
        self._ghost = node.ghost
        self._sizes = [(0, node.durable_size), *node.sizes]
        self._pages: dict[int, list[PageChange]] = {}
        for change in node.changes:
            self._pages.setdefault(change.page, []).append(change)
        self._written = [change for at, change in enumerate(node.changes) if at >= node.doubtful or change.cut]
        self._only = None if node.sizes or node.changes else Content(node.size, node.durable_pages, node.ghost)
        self._largest = max(size for _, size in self._sizes)

    def orders(self) -> set[int]:
        return {order for order, _ in self._sizes[1:]} | {change.order for change in self._written}

    def durable_pages(self, limit: int) -> list[bytes]:
        """At most ``limit`` of the durable pages."""
        return list(islice(self._durable.values(), limit))

    def _block(self, page: int) -> bytes:
        """The bytes that the disk has for a page while no change of the page is written."""
        if self._ghost is not None and self._ghost[0] == page:
            return self._ghost[1]
        return self._durable.get(page, ZERO_PAGE)

    def _content(self, size: int, pages: dict[int, bytes], *, ordered: bool = False) -> Content:
        """The content with the given size. Bytes after ``size`` in its last block become a ghost, unless sizes and
        pages are ``ordered``.
        """
        if size < self._largest:
            for page in [page for page in pages if page * PAGE >= size]:
                del pages[page]
        last, rest = divmod(size, PAGE)
        ghost = self._ghost if size == self._durable_size and last not in self._pages else None
        if last in pages and pages[last][rest:] != ZERO_PAGE[rest:]:
            ghost = (last, pages[last]) if rest and not ordered else None
            put_page(pages, last, pages[last][:rest] + ZERO_PAGE[rest:])
        return Content(size, pages, ghost)

    def prefix(self, last: int) -> Content:
        """The content that the operations up to ``last`` left."""
        if self._only is not None:
            return self._only
        pages = self._durable.copy()
        for change in self._written:
            if change.order <= last:
                put_page(pages, change.page, change.content)
        size = [size for order, size in self._sizes if order <= last][-1]
        return self._content(size, pages, ordered=True)

    def ext4(self, choose: Choose) -> Content:
        if self._only is not None:
            return self._only
        order, size = self._sizes[_one_of(choose, len(self._sizes))]
        pages = self._durable.copy()
        for page, changes in self._pages.items():
            if page * PAGE < size:
                versions = _between_truncates(self._block(page), changes, order)
                put_page(pages, page, versions[_one_of(choose, len(versions))])
        return self._content(size, pages)

    def any(self, choose: Choose, stale: Stale) -> Content:
        if self._only is not None:
            return self._only
        size = self._any_size(choose)
        pages = self._durable.copy()
        for page, changes in self._pages.items():
            if page * PAGE < size:
                old = self._block(page)
                put_page(pages, page, _any_page(choose, old, changes, self._in_doubt(page, changes), stale))
        self._spoil_new_room(choose, size, pages, stale)
        return self._content(size, pages)

    def _any_size(self, choose: Choose) -> int:
        """One of the sizes since the last sync, or a torn size, which is between two of them."""
        sizes = [size for _, size in self._sizes]
        if len(sizes) == 1:
            return sizes[0]
        choice = choose.randrange(len(sizes) + 1)
        if choice != 1:
            return sizes[max(0, choice - 1)]
        unit = (1, SECTOR, PAGE)[choose.randrange(3)]
        low = min(sizes) // unit + 1
        high = (max(sizes) - 1) // unit
        return (low + choose.randrange(high - low + 1)) * unit if low <= high else sizes[0]

    def _in_doubt(self, page: int, changes: Sequence[PageChange]) -> list[tuple[int, int]]:
        """The bytes of the page that changed since the last sync, or did not exist then."""
        spans = [(change.start, change.stop) for change in changes]
        if (page + 1) * PAGE > self._durable_size:
            spans.append((max(0, self._durable_size - page * PAGE), PAGE))
        return spans

    def _spoil_new_room(self, choose: Choose, size: int, pages: dict[int, bytes], stale: Stale) -> None:
        """Room by which a file grew, and into which nothing was stored, has written zeros. One page may be garbage."""
        first, last = self._durable_size // PAGE, (size - 1) // PAGE
        room = [page for page in range(first, last + 1) if page not in self._pages]
        if size <= self._durable_size or not room:
            return
        choice = choose.randrange(len(room) + 2)  # the first and the last choice: no page
        if 0 < choice <= len(room):
            page = room[choice - 1]
            start = max(0, self._durable_size - page * PAGE)
            old = self._durable.get(page, ZERO_PAGE)
            put_page(pages, page, old[:start] + _garbage(choose, stale)[start:])


def _one_of(choose: Choose, count: int) -> int:
    return choose.randrange(count) if count > 1 else 0


def _between_truncates(old: bytes, changes: Sequence[PageChange], order: int) -> list[bytes]:
    """The versions of a page that are possible with the size of operation ``order``. Consecutive versions differ."""
    versions = [old]
    for change in changes:
        if change.cut and change.order > order:
            break
        if change.cut:
            versions = [change.content]
        elif change.content != versions[-1]:
            versions.append(change.content)
    return versions


def _garbage(choose: Choose, stale: Stale) -> bytes:
    kinds = (_ONES, _NOISE, *stale())
    return kinds[choose.randrange(len(kinds))]


def _any_page(
    choose: Choose, old: bytes, changes: Sequence[PageChange], doubt: Sequence[tuple[int, int]], stale: Stale
) -> bytes:
    """The page: old, or with zeros or garbage in the bytes in doubt, or torn in one of two ways, or as an operation
    left it.
    """
    versions = [old, *(change.content for change in changes)]
    choice = choose.randrange(4 + len(versions))
    if choice == 0:
        return old
    if choice <= 2:
        return _filled(old, doubt, ZERO_PAGE if choice == 1 else _garbage(choose, stale))
    if choice == 3:
        return _torn_at_sectors(choose, versions)
    if choice == 4:
        at = _one_of(choose, len(changes))
        return _torn_at_a_byte(choose, versions[at], changes[at])
    return versions[choice - 4]


def _filled(old: bytes, doubt: Sequence[tuple[int, int]], fill: bytes) -> bytes:
    page = bytearray(old)
    for start, stop in doubt:
        page[start:stop] = fill[start:stop]
    return bytes(page)


def _torn_at_sectors(choose: Choose, versions: Sequence[bytes]) -> bytes:
    parts = []
    for start in range(0, PAGE, SECTOR):
        sectors = list(dict.fromkeys(version[start : start + SECTOR] for version in versions))
        parts.append(sectors[_one_of(choose, len(sectors))])
    return b"".join(parts)


def _torn_at_a_byte(choose: Choose, before: bytes, change: PageChange) -> bytes:
    """A part of ``change``: bytes from its front or from its end."""
    if change.stop - change.start < 2:
        return before
    at = change.start + 1 + choose.randrange(change.stop - change.start - 1)
    if choose.randrange(2):
        return before[:at] + change.content[at:]
    return change.content[:at] + before[at:]


def damaged(content: Content, choose: Choose) -> Content | None:
    """Damage the content. ``None``: the file is gone."""
    size, pages = content.size, content.pages.copy()
    kind = choose.randrange(6)
    if kind == 0 or size == 0:
        return None
    if kind == 1:
        size = choose.randrange(size)
        keep, rest = divmod(size, PAGE)
        for page in [page for page in pages if page >= keep]:
            put_page(pages, page, pages[page][:rest] + ZERO_PAGE[rest:] if page == keep else ZERO_PAGE)
        return Content(size, pages)
    # Most of a file is zeros, and damage to zeros tests little. So mostly a page that has other bytes is chosen.
    used = sorted(pages)
    page = (
        used[choose.randrange(len(used))]
        if used and choose.randrange(8)
        else choose.randrange((size + PAGE - 1) // PAGE)
    )
    old = pages.get(page, ZERO_PAGE)
    length = min(PAGE, size - page * PAGE)
    at = choose.randrange(length)
    if kind == 2:
        new = old[:at] + bytes([old[at] ^ 1 << choose.randrange(8)]) + old[at + 1 :]
    else:
        start = at // SECTOR * SECTOR if kind == 3 else 0
        stop = min(length, start + (SECTOR if kind == 3 else PAGE))
        fill = (ZERO_PAGE, _ONES, _NOISE)[choose.randrange(3)]
        new = old[:start] + fill[start:stop] + old[stop:]
    put_page(pages, page, new)
    return Content(size, pages)
