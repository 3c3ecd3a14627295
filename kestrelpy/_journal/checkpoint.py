"""A reader's saved state: one small file. The queue's mark has the same form.

Rules:
1. States are appended; the last whole state counts. A durable state is never overwritten in place.
2. When a file is full, or is not known to be whole, it is replaced: temporary file, sync, rename, directory sync (R3).
3. After the last state there are zeros up to the end of the file. They are on disk before the file gets its name, so
   an append takes no room and changes no size. Only the ``CheckpointFile`` that made a file appends to it: an older
   file may have, in it or after its end, a state that a power cut has undone.
4. A state that names an id is saved only after the journal is synced up to that id (R4). The caller ensures this.
5. The temporary file stays, as the spare file, made while there was room. So to replace a file takes no room: the spare
   file is written, from its first byte to its last, and synced; then the two files exchange names.
6. All states of a file have one number, the series; those of its spare file have another. Where a state was being
   appended, a power cut may leave any bytes, also those that another file has at that offset. The spare file has older
   states there, of the same reader and equally long. As they are of another series, they do not count as states here.
7. On disk, the spare file may still have the name that it had before the last exchange, that of the file itself. So the
   directory is synced before the spare file is written. After a failed sync of the spare file or of the directory,
   another spare file is made.
8. A file whose states have a move is of version 2, which older versions of the library refuse. It is replaced by one of
   version 1 with the first state that has none.
"""

from __future__ import annotations

import contextlib
import errno
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from zlib import crc32

from kestrelpy._disk.interface import NO_ROOM, Directory, File
from kestrelpy._journal import format as fmt
from kestrelpy._journal.file_names import temporary_name
from kestrelpy.errors import UnsupportedFormat

REPLACE_BYTES = 64 << 10
"""No file is made larger than this, unless one state is a quarter of it or more."""
BLOCK = 4096
"""The length of a checkpoint file is a multiple of this."""
FIRST_BLOCKS = 3
"""The blocks held for the first reader: one for its checkpoint, one for the spare file, one to free room for that."""
_TRIES = 3
_NO_EXCHANGE = (errno.ENOENT, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
"""The errors of an exchange of names if the other file is not there, or the file system cannot exchange names."""
PEEK_BYTES = 512
"""How much of a file is read first: in most files, all states, and few of the zeros after them."""
READ_BYTES = 1 << 20
"""How much is read next, if that was too little: nearly always the whole file."""


def replace_file(directory: Directory, name: str, data: bytes) -> None:
    """Make the file ``name`` hold ``data``, atomically; durable when this returns.

    Raises ``OSError`` with the old file in place.
    """
    temporary = write_temporary(directory, name, data)
    directory.rename(temporary, name)
    directory.sync()


def write_temporary(directory: Directory, name: str, data: bytes) -> str:
    """The steps of ``replace_file`` before its rename. Returns the temporary file's name. Raises ``OSError``."""
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

    A caller that does not own the file may open it just before it becomes the spare file and is written. So a file
    without a whole state is opened and read again, a few times.
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
        if version is not None and version > fmt.MOVES_VERSION:
            raise UnsupportedFormat(f"{directory.path}/{name}", version, fmt.MOVES_VERSION)
        state = fmt.decode_checkpoints(data)[0] if version in (fmt.FORMAT_VERSION, fmt.MOVES_VERSION) else None
        if state is not None:
            break
    return state, True


def field_offset(directory: Directory, name: str, field: str) -> int:
    """The offset of a field of the last whole state in the file. Raises ``OSError``."""
    file = directory.open(name)
    try:
        return fmt.checkpoint_offset(_read_states(file), field)
    finally:
        file.close()


def _read_states(file: File) -> bytes:
    """Read all of a file of a usual size. Of a larger file, read as much as its states claim to be.

    The claim may be false, and so may the file's size: neither is believed beyond the bytes that are there.
    """
    size, want = file.size(), PEEK_BYTES
    while True:
        data = file.read(0, min(want, size))
        end = fmt.checkpoints_end(data)
        if len(data) == size or end > size or end + 8 <= len(data):
            return data
        want = max(end, READ_BYTES, 2 * want)


def known_queue_id(states: Iterable[fmt.Checkpoint]) -> bytes:
    """The queue's id, from its checkpoints; empty if none has it.

    A reader that was opened in another process before the queue had a segment saves a zero id.
    """
    return next((state.queue_id for state in states if any(state.queue_id)), b"")


class KnownIds(NamedTuple):
    """What the states of one queue say: the heads of its readers, the last id known to be on disk (``watermark``), and
    the last one given out (``tail_id``).
    """

    heads: list[int]
    watermark: int
    tail_id: int


def known_ids(states: Iterable[fmt.Checkpoint], queue_id: bytes) -> KnownIds:
    """What those of ``states`` say that are of the queue of that id."""
    mine = [state for state in states if state.queue_id == queue_id]
    return KnownIds(
        [state.head for state in mine if not state.flags & fmt.FLAG_MARK],
        max((state.watermark for state in mine), default=0),
        max((state.highest_id for state in mine), default=0),
    )


def likely_queue_id(headers: Sequence[fmt.SegmentHeader], states: Iterable[fmt.Checkpoint]) -> bytes:
    """The id of the queue that most of these ``headers`` of segments name, at least one, the newest first. If several
    are named as often, it is the one that most ``states`` name, and then that of the newest segment.
    """
    ids = [header.queue_id for header in headers]
    segments, others = Counter(ids), Counter(state.queue_id for state in states)
    return max(segments, key=lambda each: (segments[each], others[each]))  # of equal ones, the first


class FileWithSpare:
    """A file that is replaced as a whole, with zeros after its content, and its spare file (rules 5 and 7).

    NOTE ON LOCKING: none of its own; its owner does one thing at a time.
    """

    def __init__(self, directory: Directory, name: str, second: str = "") -> None:
        """``second``: the name of a file that becomes the spare file if there is none. There is none after the spare
        file has become a file that did not exist before.
        """
        self._second = second
        self._directory = directory
        self.name = name
        self._held = 0  # the length of the spare file, as far as it is known
        self._exchange_is_durable = False  # the last exchange of names is on disk
        self._doubted = False  # a sync of the file has failed
        self._other_doubted = False  # a sync of the spare file or the directory has failed: it may be the file itself

    @property
    def is_spared(self) -> bool:
        """Whether a spare file with room for a small state is known to exist."""
        return self._held >= BLOCK

    def hold(self, size: int) -> None:
        """Make sure that there is a spare file of at least ``size`` bytes. On ``OSError``, a smaller one may exist."""
        if self._held < size:
            file = self._open_spare()
            try:
                self._held = file.size()
                if self._held < size:
                    file.grow(size)  # not only by zeros: btrfs stores over those in place only once they are on disk
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
        """Make the file hold ``data``; durable when this returns. Returns its length: ``size``, if there is room.

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
        """Give the spare file the name of the file: by an exchange of names, or by a rename where there is none."""
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
        """A sync of the file has failed: it must never become the spare file."""
        self._doubted = True

    def rename(self, name: str) -> None:
        """Rename the file and its spare file, durably."""
        take_over(self._directory, self.name, name)
        self.name = name
        self._held = 0


def take_over(directory: Directory, old: str, new: str) -> None:
    """Rename a file and its spare file, durably."""
    directory.rename(old, new)
    with contextlib.suppress(FileNotFoundError):
        directory.rename(temporary_name(old), temporary_name(new))
    directory.sync()


def _fill(file: File, data: bytes, size: int) -> int:
    """Write all of a spare file: ``data``, then zeros. Returns its new length.

    Raises ``OSError`` if the file has no room for ``data`` and gets none.
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
        """``second``: see ``FileWithSpare``."""
        self._directory = directory
        self._file = FileWithSpare(directory, name, second)
        self._size = 0  # where the next state goes; 0: the next save replaces the file
        self._end = 0  # states may be appended up to here
        self._series = 0  # of the states in the file
        self._has_moves = False  # the file is of the version for states with a move (rule 8)
        self.durable: fmt.Checkpoint | None = None
        """The last state known to be on disk. While it is ``None``, what the file holds may be only in the page cache,
        left there by a failed sync.
        """
        self.durable_head = 0
        """Every id up to it is done in the last state known to be on disk, and in all later ones: any may get there."""
        self.inherited = False
        """Whether the reader has taken over the default reader's checkpoint. If so, every state says it."""

    @property
    def name(self) -> str:
        return self._file.name

    @name.setter
    def name(self, name: str) -> None:
        self._file.name = name

    def hold(self, blocks: int = 1) -> None:
        """Hold what a save on a full disk needs, as far as there is room now.

        Block by block: if blocks are taken together, btrfs gives none of them back before all are cut off.
        """
        with contextlib.suppress(OSError):
            for each in range(1, blocks + 1):
                self._file.hold(each * BLOCK)

    def load(self) -> tuple[fmt.Checkpoint | None, bool]:
        """As ``load_checkpoint``. Later saves repeat what the state says of older states."""
        state, exists = load_checkpoint(self._directory, self.name)
        self.durable_head = min(state.head, state.durable_head) if state is not None else 0
        self.inherited = state is not None and bool(state.flags & fmt.FLAG_INHERITED)
        return state, exists

    def save(self, state: fmt.Checkpoint, *, durable: bool) -> None:
        """Save ``state``. It survives the process at once, and a power cut too if ``durable``.

        Raises ``OSError``; then the last saved state counts, and the next save begins a new file.
        """
        self.durable_head = min(self.durable_head, state.head)
        data = self._encode(state, self._series)
        is_full = self._size + 2 * len(data) > self._end  # two: it is appended again once it is durable
        if self._size == 0 or is_full or self._has_moves != (state.move is not None):
            self._replace(state)
            durable = True
        else:
            self._append(data, sync=durable)
            if not self._file.is_spared:  # ext4 may free the blocks that were cut off a file only a moment later
                self.hold()
        if durable:
            self._note_durable(state)

    def _encode(self, state: fmt.Checkpoint, series: int) -> bytes:
        flags = state.flags | fmt.FLAG_INHERITED if self.inherited else state.flags
        return fmt.encode_checkpoint(state._replace(durable_head=self.durable_head, flags=flags), series)

    def _replace(self, state: fmt.Checkpoint) -> None:
        """Replace the file. A file that was full becomes twice as long: it is busy."""
        series = ((self._series if self._size else self._find_series()) + 1) % fmt.SERIES
        data = self._encode(state, series)
        size = _blocks(max(4 * len(data), min(2 * self._end, REPLACE_BYTES) if self._size else 0))
        self._size = 0
        has_moves = state.move is not None
        content = fmt.checkpoint_prefix(fmt.MOVES_VERSION if has_moves else fmt.FORMAT_VERSION) + data
        self._end = self._file.replace(content, max(size, _blocks(len(content))))
        self._size, self._series, self._has_moves = len(content), series, has_moves
        try:
            self._file.hold(_blocks(2 * len(content)))
        except OSError as error:
            if error.errno in NO_ROOM and self._end >= FIRST_BLOCKS * BLOCK:
                self._share_room()

    def _find_series(self) -> int:
        """The series of the file that is to be replaced, whole or not.

        If there is no file, the series is one that files of other names do not have: a power cut may leave their bytes
        here too.
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
        """There is no room for a spare file: free some by cutting off what this file does not need."""
        end = self._end - (FIRST_BLOCKS - 1) * BLOCK
        if self._size > end:
            return
        with contextlib.suppress(OSError):
            file = self._directory.open(self.name, write=True)
            try:
                self._end = end  # first: whatever happens next, nothing is appended there
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
        """Note that ``state`` is on disk, also in the file, for a process that owns the queue and not the reader.

        A sync in that process would not show it the same, because it does not learn of a sync that failed here. If the
        note cannot be written, that process waits.
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
        """Rename the file, durably: the first named reader takes over the default reader's checkpoint."""
        self._file.rename(name)

    def forget(self) -> None:
        """The file is gone: the next save makes a new one."""
        self._size = self.durable_head = 0
        self.durable = None
