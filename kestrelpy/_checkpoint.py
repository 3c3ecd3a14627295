"""A reader's saved state: one small file, and the queue's mark, which has the same form.

Rules:
1. States are appended; the last whole one counts. Nothing that was durable is ever overwritten in place.
2. When a file has grown, or is not known to be whole, it is replaced: temporary file, sync, rename, directory sync
   (R3).
3. A file is appended to by the ``CheckpointFile`` that made it, and by no other. Behind the end of an older one may be,
   on the disk and seen by nobody, a state that a power cut has undone: ext4 may have written the block, and lost the
   size. Grown over it, the next power cut may leave the size and lose the block, and the state that was undone would
   count again.
4. A state that names an id is saved only after the journal is synced up to it (R4): the caller sees to that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from kestrelpy import _format as fmt
from kestrelpy._disk import Directory, File
from kestrelpy._names import temporary_name
from kestrelpy.errors import UnsupportedFormat

REPLACE_BYTES = 64 << 10
"""A file larger than this is replaced, unless its last state alone is a quarter of it or more."""
READ_BYTES = 1 << 20
"""What is read of a file at first: nearly always all of it."""


def replace_file(directory: Directory, name: str, data: bytes) -> None:
    """Make ``name`` hold ``data``, atomically; durable when this returns. Raises ``OSError`` with the old file in
    place.
    """
    temporary = write_temporary(directory, name, data)
    directory.rename(temporary, name)
    directory.sync()


def write_temporary(directory: Directory, name: str, data: bytes) -> str:
    """What ``replace_file`` does before anybody sees it; the name of the temporary file. Raises ``OSError``."""
    temporary = temporary_name(name)
    with contextlib.suppress(FileNotFoundError):
        directory.unlink(temporary)
    file = directory.create(temporary)
    try:
        file.write(0, data)
        file.sync()
    finally:
        file.close()
    return temporary


def load_checkpoint(directory: Directory, name: str) -> tuple[fmt.Checkpoint | None, bool]:
    """The last whole state in the file, and whether the file is there. Raises ``OSError`` and ``UnsupportedFormat``."""
    try:
        file = directory.open(name)
    except FileNotFoundError:
        return None, False
    try:
        data = _read_states(file)
    finally:
        file.close()
    version = fmt.checkpoint_version(data)
    if version is not None and version > fmt.FORMAT_VERSION:
        raise UnsupportedFormat(f"{directory.path}/{name}", version, fmt.FORMAT_VERSION)
    return (fmt.decode_checkpoints(data)[0] if version == fmt.FORMAT_VERSION else None), True


def _read_states(file: File) -> bytes:
    """All of a file of a usual size; of a larger one as much as its states say there is, which may be a lie as well as
    its size: nothing is taken for true further than it is there.
    """
    size, want = file.size(), READ_BYTES
    while True:
        data = file.read(0, min(want, size))
        end = fmt.checkpoints_end(data)
        if len(data) == size or end > size or end + 8 <= len(data):
            return data
        want = max(end, 2 * want)


def known_queue_id(states: Iterable[fmt.Checkpoint]) -> bytes:
    """The queue's id, as its checkpoints have it; empty if none does: a reader that was opened elsewhere before the
    queue had a segment leaves it zero.
    """
    return next((state.queue_id for state in states if any(state.queue_id)), b"")


class CheckpointFile:
    """The checkpoint file of one owner, for saving.

    NOTE ON LOCKING: none of its own; its owner saves one state at a time.
    """

    def __init__(self, directory: Directory, name: str) -> None:
        self._directory = directory
        self.name = name
        self._size = 0  # where the next state goes; 0: the next save replaces the file
        self.durable: fmt.Checkpoint | None = None
        """The last state known to be on disk. As long as there is none, what the file holds may be in the page cache
        alone, where a sync that failed has left it.
        """
        self.durable_head = 0
        """Every id up to it is done in the last state known to be on disk, and in all since: those may get there."""

    def load(self) -> tuple[fmt.Checkpoint | None, bool]:
        """As ``load_checkpoint``; what the state says of older ones, saves go on to say."""
        state, exists = load_checkpoint(self._directory, self.name)
        self.durable_head = min(state.head, state.durable_head) if state is not None else 0
        return state, exists

    def save(self, state: fmt.Checkpoint, *, durable: bool) -> None:
        """Save ``state``; it survives the process at once, and a power cut too if ``durable``.

        Raises ``OSError``; then the last state that was saved counts, and the next save begins a new file.
        """
        self.durable_head = min(self.durable_head, state.head)
        data = self._encode(state)
        if self._size == 0 or self._size + len(data) > max(REPLACE_BYTES, 4 * len(data)):
            self._size = 0
            replace_file(self._directory, self.name, fmt.checkpoint_prefix() + data)
            self._size = fmt.CHECKPOINT_PREFIX_BYTES + len(data)
            durable = True
        else:
            self._append(data, sync=durable)
        if durable:
            self._note_durable(state)

    def _encode(self, state: fmt.Checkpoint) -> bytes:
        return fmt.encode_checkpoint(state._replace(durable_head=self.durable_head))

    def _append(self, data: bytes, *, sync: bool) -> None:
        at, self._size = self._size, 0
        file = self._directory.open(self.name, write=True)
        try:
            file.write(at, data)
            if sync:
                file.sync()
        finally:
            file.close()
        self._size = at + len(data)

    def _note_durable(self, state: fmt.Checkpoint) -> None:
        """``state`` is on disk. Says so in the file, for those who own the queue and not the reader: a sync of theirs
        would not tell them, as of one that has failed here they hear nothing. If it can't be said, they wait.
        """
        self.durable = state
        if self.durable_head == state.head:
            return
        self.durable_head = state.head
        with contextlib.suppress(OSError):
            self._append(self._encode(state), sync=False)

    def rename(self, name: str) -> None:
        """Give the file another name, durably: the default reader's place taken over by the first named one."""
        self._directory.rename(self.name, name)
        self._directory.sync()
        self.name = name

    def forget(self) -> None:
        """The file is gone: the next save makes a new one."""
        self._size = self.durable_head = 0
        self.durable = None
