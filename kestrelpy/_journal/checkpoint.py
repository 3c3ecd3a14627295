"""A reader's saved state: one small file, and the queue's mark, which has the same form.

Rules:
1. States are appended; the last whole one counts. Nothing that was durable is ever overwritten in place.
2. When a file is full, or is not known to be whole, it is replaced: temporary file, sync, rename, directory sync (R3).
3. After the last state there are zeros, up to the end of the file, which is on disk before its name is: to append
   takes no room and changes no size. A file is appended to by the ``CheckpointFile`` that made it, and by no other:
   after the end of an older one, or in it, may be a state that a power cut has undone.
4. A state that names an id is saved only after the journal is synced up to it (R4): the caller sees to that.
5. The temporary file stays, as the spare one, made while there was room. To replace a file takes none then: the spare
   one is written, from its first byte to its last, and synced, and the two change names.
6. What a file holds has a series, a number that all its states have, and its spare file another. Where a state was
   being appended, a power cut may leave anything, what other files hold in that place too: the spare one holds older
   states there, of the same reader, and as long. Of another series they are no states here.
7. The spare file may be the file itself, on disk, if it was that in an earlier life: the directory is synced before it
   is written. After a sync has failed, of the spare file or of the directory, another one is made.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable
from zlib import crc32

from kestrelpy._disk.interface import NO_ROOM, Directory, File
from kestrelpy._journal import format as fmt
from kestrelpy._journal.file_names import temporary_name
from kestrelpy.errors import UnsupportedFormat

REPLACE_BYTES = 64 << 10
"""No file is made larger than this, unless a state alone is a quarter of it or more."""
BLOCK = 4096
"""The length of a checkpoint file is a multiple of this."""
FIRST_BLOCKS = 3
"""So many are held for the first reader: one for its place, one for the spare file, and one to find room for that."""
_TRIES = 3
_NO_EXCHANGE = (errno.ENOENT, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
"""There is nothing to exchange names with, or the file system does not know how to."""
PEEK_BYTES = 512
"""What is read of a file at first: the states of most, and not the zeros after them."""
READ_BYTES = 1 << 20
"""What is read then: nearly always all of it."""


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
    """The last whole state in the file, and whether the file is there. Raises ``OSError`` and ``UnsupportedFormat``.

    Who looks from outside may have opened what has become the spare file since, and is being written: then once more.
    """
    state = None
    for _ in range(_TRIES):
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
        state = fmt.decode_checkpoints(data)[0] if version == fmt.FORMAT_VERSION else None
        if state is not None:
            break
    return state, True


def field_offset(directory: Directory, name: str, field: str) -> int:
    """Where a field of the last whole state in the file is. Raises ``OSError``."""
    file = directory.open(name)
    try:
        return fmt.checkpoint_offset(_read_states(file), field)
    finally:
        file.close()


def _read_states(file: File) -> bytes:
    """All of a file of a usual size; of a larger one as much as its states say there is, which may be a lie as well as
    its size: nothing is taken for true further than it is there.
    """
    size, want = file.size(), PEEK_BYTES
    while True:
        data = file.read(0, min(want, size))
        end = fmt.checkpoints_end(data)
        if len(data) == size or end > size or end + 8 <= len(data):
            return data
        want = max(end, READ_BYTES, 2 * want)


def known_queue_id(states: Iterable[fmt.Checkpoint]) -> bytes:
    """The queue's id, as its checkpoints have it; empty if none does: a reader that was opened elsewhere before the
    queue had a segment leaves it zero.
    """
    return next((state.queue_id for state in states if any(state.queue_id)), b"")


class SparedFile:
    """A file that is replaced as a whole, with zeros after what it holds, and its spare one (rules 5 and 7).

    NOTE ON LOCKING: none of its own; its owner does one thing at a time.
    """

    def __init__(self, directory: Directory, name: str, second: str = "") -> None:
        """``second``: the name of a file that becomes the spare one where there is none, as where that has become the
        file itself, which was not there before.
        """
        self._second = second
        self._directory = directory
        self.name = name
        self._held = 0  # the length of the spare file, as far as it is known
        self._exchange_is_durable = False  # the last exchange of names is on disk
        self._doubted = False  # a sync of the file has failed
        self._other_doubted = False  # one of the spare file has, or of the directory: it may be the file itself

    @property
    def is_spared(self) -> bool:
        """Whether it is known that there is a spare file, with room for a small state."""
        return self._held >= BLOCK

    def hold(self, size: int) -> None:
        """Have a spare file, of ``size`` bytes at least. Raises ``OSError``: there may be one of fewer then."""
        if self._held < size:
            file = self._open_spare()
            try:
                self._held = file.size()
                if self._held < size:
                    file.grow(size)  # not zeros alone: btrfs stores over those once they are on disk, and not before
                    self._held = size
            finally:
                file.close()

    def _open_spare(self) -> File:
        if self._other_doubted:
            with contextlib.suppress(FileNotFoundError):
                self._directory.unlink(temporary_name(self.name))
            self._other_doubted = False
        spare = temporary_name(self.name)
        try:
            return self._directory.open(spare, write=True)
        except FileNotFoundError:
            if self._second:
                with contextlib.suppress(OSError):
                    self._directory.rename(self._second, spare)
                    return self._directory.open(spare, write=True)
            return self._directory.create(spare)

    def replace(self, data: bytes, size: int) -> int:
        """Make the file hold ``data``; durable when this returns. Its length, ``size`` if there is room for that.

        Raises ``OSError`` with the old file in place.
        """
        file = self._open_spare()
        try:
            if not self._exchange_is_durable and file.read(0, 1).strip(b"\0"):
                self._directory.sync()
            end = _fill(file, data, size)
            self._held, self._exchange_is_durable, self._other_doubted = 0, False, True
            file.sync()
        finally:
            file.close()
        self._take_name()
        return end

    def _take_name(self) -> None:
        """Let the spare file be the file."""
        spare = temporary_name(self.name)
        try:
            self._directory.open(self.name).close()
            self._directory.exchange(spare, self.name)
        except OSError as error:
            if error.errno not in _NO_EXCHANGE:
                raise
            self._directory.rename(spare, self.name)
        self._directory.sync()
        self._exchange_is_durable, self._other_doubted, self._doubted = True, self._doubted, False

    def doubt(self) -> None:
        """A sync of the file has failed: it is never to be the spare one."""
        self._doubted = True

    def rename(self, name: str) -> None:
        """Give the file another name, durably, and the spare one too."""
        take_over(self._directory, self.name, name)
        self.name = name
        self._held = 0


def take_over(directory: Directory, old: str, new: str) -> None:
    """Rename a spared file, durably."""
    directory.rename(old, new)
    with contextlib.suppress(FileNotFoundError):
        directory.rename(temporary_name(old), temporary_name(new))
    directory.sync()


def _fill(file: File, data: bytes, size: int) -> int:
    """Write all of a spare file: ``data``, then zeros; how long it is then. Raises ``OSError`` if it has no room for
    ``data``, and finds none.
    """
    length = file.size()
    if length > 4 * size:
        file.truncate(size)
        length = size
    end = _blocks(max(length, len(data)))
    file.write(0, data, bytes(end - len(data)))
    if end < size:
        try:
            file.write(end, bytes(size - end))
            end = size
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
    return end


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


class CheckpointFile:
    """The checkpoint file of one owner, for saving.

    NOTE ON LOCKING: none of its own; its owner saves one state at a time.
    """

    def __init__(self, directory: Directory, name: str, second: str = "") -> None:
        """``second``: see ``SparedFile``."""
        self._directory = directory
        self._file = SparedFile(directory, name, second)
        self._size = 0  # where the next state goes; 0: the next save replaces the file
        self._end = 0  # states may go up to here
        self._series = 0  # of the states in the file
        self.durable: fmt.Checkpoint | None = None
        """The last state known to be on disk. As long as there is none, what the file holds may be in the page cache
        alone, where a sync that failed has left it.
        """
        self.durable_head = 0
        """Every id up to it is done in the last state known to be on disk, and in all since: those may get there."""
        self.inherited = False
        """Whether the reader has taken over the default reader's place: then every state says so."""

    @property
    def name(self) -> str:
        return self._file.name

    @name.setter
    def name(self, name: str) -> None:
        self._file.name = name

    def hold(self, blocks: int = 1) -> None:
        """Hold back what it takes to save a state when the disk is full, as far as there is room now.

        Block by block: of blocks that were taken together, btrfs gives none back before all are cut off.
        """
        with contextlib.suppress(OSError):
            for each in range(1, blocks + 1):
                self._file.hold(each * BLOCK)

    def load(self) -> tuple[fmt.Checkpoint | None, bool]:
        """As ``load_checkpoint``; what the state says of older ones, saves go on to say."""
        state, exists = load_checkpoint(self._directory, self.name)
        self.durable_head = min(state.head, state.durable_head) if state is not None else 0
        self.inherited = state is not None and bool(state.flags & fmt.FLAG_INHERITED)
        return state, exists

    def save(self, state: fmt.Checkpoint, *, durable: bool) -> None:
        """Save ``state``; it survives the process at once, and a power cut too if ``durable``.

        Raises ``OSError``; then the last state that was saved counts, and the next save begins a new file.
        """
        self.durable_head = min(self.durable_head, state.head)
        data = self._encode(state, self._series)
        if self._size == 0 or self._size + 2 * len(data) > self._end:  # it will be said again, as a durable one
            self._replace(state)
            durable = True
        else:
            self._append(data, sync=durable)
            if not self._file.is_spared:  # what was cut off a file may be free a moment later only (ext4)
                self.hold()
        if durable:
            self._note_durable(state)

    def _encode(self, state: fmt.Checkpoint, series: int) -> bytes:
        flags = state.flags | fmt.FLAG_INHERITED if self.inherited else state.flags
        return fmt.encode_checkpoint(state._replace(durable_head=self.durable_head, flags=flags), series)

    def _replace(self, state: fmt.Checkpoint) -> None:
        """A file that was full is twice as long the next time: it is busy."""
        series = ((self._series if self._size else self._find_series()) + 1) % fmt.SERIES
        data = self._encode(state, series)
        size = _blocks(max(4 * len(data), min(2 * self._end, REPLACE_BYTES) if self._size else 0))
        self._size = 0
        content = fmt.checkpoint_prefix() + data
        self._end = self._file.replace(content, max(size, _blocks(len(content))))
        self._size, self._series = len(content), series
        try:
            self._file.hold(_blocks(2 * len(content)))
        except OSError as error:
            if error.errno in NO_ROOM and self._end >= FIRST_BLOCKS * BLOCK:
                self._share_room()

    def _find_series(self) -> int:
        """That of the file which is to be replaced, whole or not. Where there is none, one that other names don't have:
        their files may be what a power cut leaves here too.
        """
        try:
            file = self._directory.open(self.name)
        except FileNotFoundError:
            return crc32(self.name.encode()) % fmt.SERIES
        try:
            return fmt.checkpoint_series(file.read(0, PEEK_BYTES))
        finally:
            file.close()

    def _share_room(self) -> None:
        """There is no room for a spare file: one is made of what this file has too much."""
        end = self._end - (FIRST_BLOCKS - 1) * BLOCK
        if self._size > end:
            return
        with contextlib.suppress(OSError):
            file = self._directory.open(self.name, write=True)
            try:
                self._end = end  # first: whatever becomes of the rest, nothing is appended there
                file.truncate(end)
                self._sync(file)
            finally:
                file.close()
            self._file.hold(BLOCK)

    def _append(self, data: bytes, *, sync: bool) -> None:
        at, self._size = self._size, 0
        file = self._directory.open(self.name, write=True)
        try:
            file.write(at, data)
            if sync:
                self._sync(file)
        finally:
            file.close()
        self._size = at + len(data)

    def _sync(self, file: File) -> None:
        try:
            file.sync()
        except BaseException:
            self._file.doubt()
            raise

    def _note_durable(self, state: fmt.Checkpoint) -> None:
        """``state`` is on disk. Says so in the file, for those who own the queue and not the reader: a sync of theirs
        would not tell them, as of one that has failed here they hear nothing. If it can't be said, they wait.
        """
        self.durable = state
        if self.durable_head == state.head:
            return
        self.durable_head = state.head
        data = self._encode(state, self._series)
        if self._size + len(data) <= self._end:
            with contextlib.suppress(OSError):
                self._append(data, sync=False)

    def rename(self, name: str) -> None:
        """Give the file another name, durably: the default reader's place taken over by the first named one."""
        self._file.rename(name)

    def forget(self) -> None:
        """The file is gone: the next save makes a new one."""
        self._size = self.durable_head = 0
        self.durable = None
