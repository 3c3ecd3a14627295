"""The states of a simulated disk that a power cut may leave.

Choices make a state. They are drawn one after the other as ``choose.randrange(n)``. The first choice always means
*lost* and the last *kept*. So 0, 0, 0... is the disk as it was synced, and always the last choice is the disk as
processes saw it. A test that shrinks its choices towards 0 ends with the fewest things kept. There are choices for a
file only if a name of the file is left.

What is legal, and why:

``PREFIX``  The operations reached the disk in their order, up to some point. Every file system may behave so, and some
    do (with journalled data, or log-structured). Pages that a failed sync marked as clean are never written, so they
    are lost.

``EXT4``  Names come from a journal: a prefix of the operations on folders. A move between folders is one transaction,
    so a sync of either folder makes it durable. Data is written back by page, in any order, at any time: each page
    holds what some operation left in it, or what was durable. The size is in the inode, and any size since the last
    sync may be there. Pages within the size that were not written are zeros (a hole, also in the middle). A truncate
    frees blocks and sets the size in one transaction: a page is never older than a truncate that the size shows, and
    never newer than a truncate that the size does not show. A last block may be written while the size is from before.
    No process sees the bytes of that block after the size. But when a later process makes the file grow into the block,
    the next power cut may leave the new size and the old block: then bytes that the first power cut lost are back.
    (ext4 does this: docs/design.md.)

``ANY``  Everything that POSIX does not forbid. Each operation on names is kept or lost. But operations on one name keep
    their order, and a rename within a folder is one operation: the old file or the new one, never neither. A move
    between folders is two operations: the file may be in both folders (as two files: where links are counted, a move is
    atomic). If only the folder that it left was synced, it may be in neither. Sizes may be torn. A page may be old,
    torn between sectors of 512 bytes, torn at a byte, or lost, with zeros or garbage in the bytes that were in doubt.
    Bytes that were synced and not changed since always stay, because a promise may depend on them.

``HOSTILE``  As ``ANY``, and then up to three damages to something durable: a bit, a sector, a page, the end of a file,
    a name. Then only safety can be promised.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from math import prod

from kestrelpy.testing._choices import Choose, Corner, Odometer, choosers
from kestrelpy.testing._file_states import Content, FileStates, damaged
from kestrelpy.testing._history import CrashingFolder, CrashingNode
from kestrelpy.testing._name_states import NameStates

_STALE_PAGES = 8
"""The most pages of other files from which garbage may come."""


class PowerModel(enum.Enum):
    """What a power cut may do. The module's docstring says why each is legal."""

    PREFIX = "prefix"
    EXT4 = "ext4"
    ANY = "any"
    HOSTILE = "hostile"


class Image:
    """A whole disk: for each folder's path, the files by their names."""

    __slots__ = ("folders",)

    def __init__(self, folders: dict[str, dict[str, Content]]) -> None:
        self.folders = folders

    def key(self) -> int:
        """A hash that is equal for equal images, whatever the order of names."""
        return hash(
            frozenset(
                (path, frozenset((name, content.key()) for name, content in files.items()))
                for path, files in self.folders.items()
            )
        )


class PowerStates:
    """The states that a power cut may leave of a disk, as the disk was when this object was made."""

    def __init__(self, folders: Mapping[str, CrashingFolder], settled: set[int]) -> None:
        self._names = NameStates(folders, settled)
        self._files: dict[CrashingNode, FileStates] = {}
        for folder in folders.values():
            for node in (*folder.durable.values(), *(change.node for change in folder.changes)):
                if node is not None and node not in self._files:
                    self._files[node] = FileStates(node)
        self._stale: dict[CrashingNode, list[bytes]] = {}
        self._orders = sorted(self._names.orders().union(*(states.orders() for states in self._files.values())))

    def one(self, choose: Choose, model: PowerModel) -> Image:
        match model:
            case PowerModel.PREFIX:
                count = choose.randrange(len(self._orders) + 1) if self._orders else 0
                last = self._orders[count - 1] if count else 0
                return self._image(self._names.prefix(last), lambda node: self._files[node].prefix(last))
            case PowerModel.EXT4:
                return self._image(self._names.ext4(choose), lambda node: self._files[node].ext4(choose))
            case PowerModel.ANY:
                return self._any(choose)
            case PowerModel.HOSTILE:
                return _damaged(self._any(choose), choose)

    def _any(self, choose: Choose) -> Image:
        return self._image(
            self._names.any(choose), lambda node: self._files[node].any(choose, lambda: self._stale_for(node))
        )

    def _image(
        self, folders: Mapping[str, Mapping[str, CrashingNode]], content_of: Callable[[CrashingNode], Content]
    ) -> Image:
        contents: dict[CrashingNode, Content] = {}
        image: dict[str, dict[str, Content]] = {}
        for path, names in folders.items():
            image[path] = files = {}
            for name, node in names.items():
                content = contents.get(node)
                if content is None:
                    content = contents[node] = content_of(node)
                files[name] = content
        return Image(image)

    def _stale_for(self, node: CrashingNode) -> list[bytes]:
        """Pages of other files. A block that was never written for its new owner may hold them."""
        if node not in self._stale:
            others = (states.durable_pages(_STALE_PAGES) for other, states in self._files.items() if other is not node)
            self._stale[node] = list(dict.fromkeys(chain.from_iterable(others)))[:_STALE_PAGES]
        return self._stale[node]

    def several(self, model: PowerModel, limit: int, seed: int) -> Iterator[Image]:
        """Yield different images, ``limit`` at most: all images, or corners and samples."""
        lost, kept = Corner(last=False), Corner(last=True)
        self.one(lost, model)
        self.one(kept, model)
        if max(prod(lost.counts), prod(kept.counts)) <= 4 * limit:
            everything = self._all(model, limit)
            if everything is not None:
                yield from everything
                return
        seen: set[int] = set()
        for choose in choosers(lost.counts, kept.counts, limit, random.Random(seed)):
            image = self.one(choose, model)
            key = image.key()
            if key not in seen:
                seen.add(key)
                yield image
            if len(seen) >= limit:
                return

    def _all(self, model: PowerModel, limit: int) -> list[Image] | None:
        """All images; ``None`` if there are more than ``limit``, or too many sequences of choices."""
        images: dict[int, Image] = {}
        odometer = Odometer()
        for _ in range(16 * limit + 64):
            image = self.one(odometer, model)
            images.setdefault(image.key(), image)
            if len(images) > limit:
                return None
            if not odometer.advance():
                return list(images.values())
        return None


# -- damage ----------------------------------------------------------------------------------------------------------


def _damaged(image: Image, choose: Choose) -> Image:
    for _ in range((1, 2, 3, 0)[choose.randrange(4)]):
        files = [(path, name) for path, names in image.folders.items() for name in names]
        if files:
            path, name = files[choose.randrange(len(files))]
            content = damaged(image.folders[path][name], choose)
            names = dict(image.folders[path])
            if content is None:
                del names[name]
            else:
                names[name] = content
            image = Image({**image.folders, path: names})
    return image
