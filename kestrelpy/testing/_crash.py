"""A disk that can crash. It knows for each byte and each name whether it is on disk, or a power cut would lose it.

Rules:
1. A kill leaves exactly one state: what processes saw. Changes that were not synced are not synced after the kill
   either.
2. A power cut leaves one of many states, which ``_power.py`` describes. Everything in that state is durable.
3. A disk is used by one thread, or by several threads that take turns. Clones share nothing that changes.

``_history.py`` has the history of each file and folder, and the effect of a sync.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import cast

from kestrelpy._disk.memory import Folder, Life, MemoryDisk, Node
from kestrelpy.testing._choices import Choose
from kestrelpy.testing._file_states import Content
from kestrelpy.testing._history import CrashingFolder, CrashingNode, NameChange
from kestrelpy.testing._power import Image, PowerModel, PowerStates


class CrashingDisk(MemoryDisk):
    """A disk in memory on which a kill or a power cut can happen before any operation.

    ``before_operation`` is called before every operation that changes the disk: a store into a buffer, write, grow,
    truncate, sync, create, rename, move, unlink, sync of a directory, the making of a folder. At this time the
    operation has not begun; ``next_operation`` names it. If the hook raises, the caller of the operation gets this
    error, and the operation is not done. ``operations`` counts the operations that were begun. Clones have no hook, and
    count from 0.

    For use by one thread: waiting for a lock raises ``RuntimeError``.
    """

    def __init__(self, *, mounts: Iterable[str] = ()) -> None:
        self._order = 0
        self._settled: set[int] = set()
        self._start()
        super().__init__(mounts=mounts)

    def _start(self) -> None:
        self.before_operation: Callable[[], None] | None = None
        self.operations = 0
        self.next_operation = ("", "")
        """The kind of the next or current operation, and the name of its file or the path of its folder."""
        self._in_flight: tuple[Node, int, bytes] | None = None
        self._states: PowerStates | None = None

    @property
    def crashing_folders(self) -> dict[str, CrashingFolder]:
        """Its folders, by path."""
        return cast("dict[str, CrashingFolder]", self.folders)

    # -- clones ------------------------------------------------------------------------------------------------------

    def after_kill(self, choose: Choose | None = None) -> CrashingDisk:
        """The disk after the death of all processes: a clone with the contents that they saw, without handles or locks.

        Changes that were not synced are not synced in the clone either: a power cut after the kill loses them. If this
        is called from ``before_operation`` with ``choose``, the clone has a part of the next store or write: bytes from
        its front, or from its end (because a copy need not go forwards).
        """
        clone = self._bare_clone()
        clone._order = self._order
        twins: dict[CrashingNode, CrashingNode] = {}

        def twin(node: CrashingNode | None) -> CrashingNode | None:
            if node is not None and node not in twins:
                twins[node] = node.clone()
            return twins[node] if node is not None else None

        clone._settled = self._settled.copy()
        for path, folder in self.crashing_folders.items():
            other = CrashingFolder(path, folder.mount, folder.made, clone._settled)
            other.names = {name: cast(Node, twin(cast(CrashingNode, node))) for name, node in folder.names.items()}
            other.durable = {name: cast(CrashingNode, twin(node)) for name, node in folder.durable.items()}
            other.changes = [NameChange(order, name, twin(node), moved) for order, name, node, moved in folder.changes]
            other.doubtful = folder.doubtful
            clone.folders[path] = other
        if choose is not None and self._in_flight is not None:
            node, offset, data = self._in_flight
            start, stop = _part(choose, len(data))
            in_clone = twin(cast(CrashingNode, node))
            assert in_clone is not None
            if start < stop:
                clone._order += 1
                in_clone.store(offset + start, data[start:stop], clone._order)
        return clone

    def after_power_cut(self, choose: Choose, model: PowerModel) -> CrashingDisk:
        """The disk after a power cut: a clone in one state that ``model`` allows, all of it durable.

        ``choose`` makes the choices, by ``choose.randrange(n)``: a ``random.Random``, a value from
        ``hypothesis.strategies.randoms``, or a similar object. If it always takes the first choice, all pending changes
        are lost; if it always takes the last, all are kept.
        """
        return self._restored(self._power_states().one(choose, model))

    def power_states(self, model: PowerModel, limit: int, *, seed: int = 0) -> Iterator[CrashingDisk]:
        """Yield at most ``limit`` different states that ``model`` allows; all of them, if few choices lead to them.

        Otherwise yields corners (all lost, all kept, a single thing lost or kept) and samples drawn with ``seed``. The
        states are those at the first ``next``; later changes of the disk do not matter.
        """
        for image in self._power_states().several(model, limit, seed):
            yield self._restored(image)

    def digest(self) -> int:
        """A hash of what processes see, and of durable bytes after the ends of files. Equal disks have equal digests.

        Valid within one process. Cost: hashing the new pages.
        """
        folders = self.crashing_folders.items()
        return Image(
            {
                path: {name: _seen(cast(CrashingNode, node)) for name, node in folder.names.items()}
                for path, folder in folders
            }
        ).key()

    def _power_states(self) -> PowerStates:
        if self._states is None:
            self._states = PowerStates(self.crashing_folders, self._settled)
        return self._states

    def _bare_clone(self) -> CrashingDisk:
        clone = CrashingDisk.__new__(CrashingDisk)
        clone._start()
        clone._order = 0
        clone.bytes_read = 0
        clone._settled = set()
        clone.life = Life()
        clone._mounts = self._mounts
        clone.folders = {}
        return clone

    def _restored(self, image: Image) -> CrashingDisk:
        clone = self._bare_clone()
        for path, files in image.folders.items():
            folder = CrashingFolder(path, self.folders[path].mount, 0, clone._settled)
            folder.durable = {
                name: CrashingNode(content.size, content.pages, content.ghost) for name, content in files.items()
            }
            folder.names = dict(folder.durable)
            clone.folders[path] = folder
        return clone

    # -- calls from MemoryDisk ---------------------------------------------------------------------------------------

    def _before(self, kind: str, name: str, node: Node | None = None, offset: int = 0, data: bytes = b"") -> int:
        self.next_operation = (kind, name)
        if self.before_operation is not None:
            self._in_flight = None if node is None else (node, offset, data)
            try:
                self.before_operation()
            finally:
                self._in_flight = None
        self._states = None
        self.operations += 1
        self._order += 1
        return self._order

    def _changed(self) -> None:
        self._states = None

    def _new_node(self) -> Node:
        return CrashingNode()

    def _new_folder(self, path: str, order: int) -> Folder:
        return CrashingFolder(path, self._mount_of(path), order, self._settled)

    def _sync_folder(self, folder: Folder) -> None:
        super()._sync_folder(folder)
        for path, inner in self.crashing_folders.items():
            if path != "/" and path.rpartition("/")[0] == folder.path.rstrip("/"):
                inner.made = 0

    def _wait(self) -> None:
        raise RuntimeError("this wait for a lock would never end: a CrashingDisk is for one thread")

    def _check(self) -> None:
        """Assert the invariants that hold after every operation."""
        for folder in self.crashing_folders.values():
            pending = {change.name for change in folder.changes}
            for name in folder.names.keys() | folder.durable.keys():
                assert name in pending or folder.names.get(name) is folder.durable.get(name)
            for node in {*folder.names.values(), *folder.durable.values()}:
                cast(CrashingNode, node)._check()


def _seen(node: CrashingNode) -> Content:
    return Content(node.size, node.pages, node.ghost)


def _part(choose: Choose, size: int) -> tuple[int, int]:
    """Choose the part of a store that is done: nothing, everything, the front or the end."""
    count = choose.randrange(size + 1)
    if 0 < count < size and choose.randrange(2):
        return size - count, size
    return 0, count
