"""The files of a queue that follow its log: a folder is brought to the state of a log, again and again.

Rules:
1. ``bring_to`` may be repeated, whatever cut it short before: an error, a kill, a power cut. It keeps what is good.
2. Bytes of the journal are on disk before anything that says so: the footer of a segment comes after the rest of it,
   the next segment after that, and checkpoints, the ledger and the mark after all of them. Segments that all readers
   have passed go last, the oldest first.
3. A closed segment here is known by its size, its header and its footer: these are written last, after its crc was that
   of its SEAL. The active one is compared with the log by its crc, and if it differs, slot by slot; what is beyond the
   log is cut off.
4. ``jobs.standby`` is there from before the first of these files until an owner has opened them: no reader is opened
   meanwhile. ``jobs.restore`` is there while the files are not one journal, as of a restore: then nobody opens them.
5. A log that ends before what was here already was put back: nothing is cut off for it.

NOTE ON LOCKING: none of its own; its owner does one thing at a time, with the queue's lock.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple
from zlib import crc32

from kestrelpy._disk.interface import Directory, Disk, File, Lock
from kestrelpy._journal import file_names
from kestrelpy._journal import format as fmt
from kestrelpy._journal.checkpoint import CheckpointFile, replace_file
from kestrelpy._journal.purpose import renew_mark
from kestrelpy._journal.queue_files import QueueFiles
from kestrelpy._journal.small_files import make_sign
from kestrelpy.errors import UnsupportedFormat
from kestrelpy.inbox.parts import open_inbox
from kestrelpy.ship.errors import HistoryMismatch, RestoreTargetExists, ShipError, StoreDamaged
from kestrelpy.ship.lazy import drop_missing
from kestrelpy.ship.manifest import LogState
from kestrelpy.ship.reading import ShippedQueue
from kestrelpy.ship.restoring import needed, write_restored_mark
from kestrelpy.ship.ship_file import ShipFile, read_ship_file, write_ship_file
from kestrelpy.ship.slots import FENCE, SealedSegment, ShippedLedger, Slot, slot_key

_READ_BYTES = 1 << 20
_FOR_PEOPLE = (
    b"The queue beside this file follows a log in a store (kestrelpy.ship.Standby): it has an owner elsewhere.\n"
)


class ActivePart(NamedTuple):
    """How much of the active segment is on disk here: its number, up to which offset, and the crc of that."""

    number: int
    end: int
    crc: int


class StandbyFolder:
    """The files of one queue in one folder. ``url``: how ``jobs.ship`` names the store."""

    def __init__(self, directory: Directory, shipped: ShippedQueue, url: str, disk: Disk | None = None) -> None:
        self.directory = directory
        self.queue = shipped.queue
        self.files = QueueFiles(directory, shipped.queue)
        self.recent: dict[int, Slot] = {}
        """Slots that were read a moment ago, by number: those with bytes that are not here yet."""
        self._shipped = shipped
        self._url = url
        self._disk = disk
        self._lock: Lock | None = None
        self._own_nonces: tuple[bytes, ...] = ()
        self.forget_all()

    def forget_all(self) -> None:
        """Believe nothing of what is here: ``bring_to`` looks at the files again."""
        self._is_known = False
        self._active: ActivePart | None = None
        self._closed: set[int] = set()
        self._here: set[int] = set()
        self._unnamed: set[int] = set()  # files that are new: what was to be in them has not come yet
        self._savers: dict[str, CheckpointFile] = {}
        self._saved: dict[str, fmt.Checkpoint] = {}
        self._ledger: ShippedLedger | None = None
        self._marked = (-1, 0, 0)
        self._given_out = (0, 0)  # of which epoch, and the id

    # -- the lock ----------------------------------------------------------------------------------------------------

    def lock(self) -> None:
        """Take the queue's lock. Raises ``QueueLocked``, also if another process has a reader open; ``InvalidName``;
        ``RestoreTargetExists`` if the folder has a queue of that name that is not shipped, ``HistoryMismatch`` if it is
        shipped elsewhere; ``OSError``.
        """
        lock, names = self.files.lock(restoring=True)
        try:
            self._check_ours(names)
            file = self._ship_file()
            self._own_nonces = file.nonces if file is not None and file.epoch else ()
        except BaseException:
            lock.release()
            raise
        self._lock = lock

    def was_owner(self, state: LogState) -> bool:
        """Whether the log's last owner was the queue in this folder, before it became a standby's."""
        return state.header is not None and state.header.nonce in self._own_nonces

    def _check_ours(self, names: list[str]) -> None:
        queue, there = self.queue, file_names.but_for_locks(names, self.queue)
        if not there or file_names.restore_name(queue) in there:
            return
        file = read_ship_file(self.directory, queue)
        if file is None:
            reason = "a queue of this name is there, and is not shipped: nothing says that it is the one in the store"
            raise RestoreTargetExists(f"{self.directory.path}/{queue}", reason)
        if file.url != self._url:
            raise HistoryMismatch(f"the queue here is shipped to {file.url}", 0, 0)
        self.refuse_open_readers(names)

    def refuse_open_readers(self, names: list[str]) -> None:
        """Raise ``QueueLocked`` if a reader is open, in any process."""
        for reader in sorted(file_names.owned_among(names, self.queue)):
            self.files.lock_reader(reader).release()

    def unlock(self) -> None:
        """Release the lock. May be repeated."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def abandon(self) -> None:
        """In a forked child: the lock is the parent's."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.abandon()
        self.directory.close()

    # -- to a state of the log ---------------------------------------------------------------------------------------

    def bring_to(self, state: LogState) -> None:
        """Make the files those of the queue at ``state``, from the lowest head of a reader on. All is on disk when this
        returns.

        Raises ``HistoryMismatch`` for the log of another queue, or one that was put back; ``StoreDamaged``,
        ``StoreUnavailable``, ``UnsupportedFormat``, ``QueueLocked``, ``OSError``. Then it is repeated.
        """
        try:
            wanted = needed(state)
            passed = self._passed(state)
            if passed is None:
                self.forget_all()
            is_new = not self._is_known
            if is_new:
                self._begin(state)
            for segment in [*(passed or ()), *wanted]:
                if segment.number not in self._closed:
                    self._complete(segment)
            if state.tail:
                self._extend(state)
            self._save_states(state)
            self._save_mark(state)
            self._remove_old({each.number for each in wanted} | ({state.place.number} if state.tail else set()))
            if is_new:
                self._settle(state)
                self._is_known = True
        except (ShipError, UnsupportedFormat):  # what was written is known
            raise
        except BaseException:
            self.forget_all()
            raise
        self.recent.clear()

    def _passed(self, state: LogState) -> list[SealedSegment] | None:
        """The segment that was active here, if it is closed by now and nobody needs it: it must be whole before a later
        one is there. ``None`` if the log does not name it any more.
        """
        active = self._active
        if active is None or (state.tail and active.number == state.place.number):
            return []
        return [each for each in state.segments if each.number == active.number] or None

    def _begin(self, state: LogState) -> None:
        """Look at what is there, and say durably what these files are."""
        assert state.header is not None
        names = file_names.of_queue(self.directory.names(), self.queue)
        file = self._ship_file()
        if file is not None and file.queue_id != state.header.queue_id:
            raise HistoryMismatch("the store has another queue of this name", 0, state.last_id)
        if file is not None and state.slot < file.slot_there:
            reason = f"the log ends at slot {state.slot}, and slot {file.slot_there} was there"
            raise HistoryMismatch(reason, 0, state.last_id)
        segments = file_names.segments_among(names, self.queue)
        self._here = {number for number, name in segments if not file_names.is_new(name)}
        if file_names.standby_name(self.queue) not in names:
            self.sign()
        elif not self._goes_on(state):
            self._sign(file_names.restore_name(self.queue), names)
        if file_names.lazy_name(self.queue) in names:
            self._sign(file_names.restore_name(self.queue), names)  # till all of it is here, nobody may open it
            self._here -= drop_missing(self.directory, self.queue)
        self.directory.sync()  # who was killed may have given names, and not synced them
        self.files.remove_leftovers(names)

    def sign(self) -> None:
        """Say durably that these files follow a log, and that they are not one journal yet. Raises ``QueueLocked`` if a
        reader is open, or is being opened; ``OSError``.
        """
        names = self.directory.names()
        with self.files.guard(wait=False):  # whoever opens a reader has it, too, from his look at the names on
            self.refuse_open_readers(names)
            self._sign(file_names.restore_name(self.queue), names)
            self._sign(file_names.standby_name(self.queue), names)

    def _goes_on(self, state: LogState) -> bool:
        """Whether what is missing here comes after what is here, so that there is one journal at any time."""
        wanted = [*(each.number for each in needed(state)), *([state.place.number] if state.tail else [])]
        return not wanted or wanted[0] in self._here

    def _ship_file(self) -> ShipFile | None:
        return read_ship_file(self.directory, self.queue)

    def _sign(self, name: str, names: list[str]) -> None:
        """Make a file of which only the name counts. The name is on disk when this returns."""
        if name in names:
            self.directory.sync()
        else:
            make_sign(self.directory, name, _FOR_PEOPLE)

    def _settle(self, state: LogState) -> None:
        """The files are one journal: anybody may look at them."""
        self.note(state)
        with contextlib.suppress(FileNotFoundError):
            self.directory.unlink(file_names.restore_name(self.queue))
            self.directory.sync()

    def note(self, state: LogState, *, lease_over: bool = False) -> None:
        """Note in ``jobs.ship`` how far the files have come, and whether the lease of the log's owner is over. The
        nonces of takeovers that were given up stay: one of them may have the log's last FENCE. Those of an owner that
        was here go: it may have given out ids that nothing here shows, so the next one begins far above them (S13).
        Raises ``OSError``.
        """
        assert state.header is not None
        file = self._ship_file()
        nonces = () if file is None or file.epoch else file.nonces
        about = ShipFile(self._url, state.header.queue_id, nonces, restored_slot=state.slot, restored_to_end=True)
        about = about._replace(lease_over=lease_over)
        write_ship_file(self.directory, self.queue, about)

    def is_ours(self, state: LogState) -> bool:
        """Whether the log ends with the FENCE of an opening here that was given up: then nobody has the queue."""
        file, header = self._ship_file(), state.header
        return file is not None and header is not None and header.kind == FENCE and header.nonce in file.nonces

    def hold_room(self, size: int) -> None:
        """Raise ``OSError`` unless there is room for a file of that size, which is given back."""
        name = file_names.temporary_name(file_names.standby_name(self.queue))
        with contextlib.suppress(FileNotFoundError):
            self.directory.unlink(name)
        file = self.directory.create(name)
        try:
            file.grow(size)
        finally:
            file.close()
            self.directory.unlink(name)

    # -- closed segments ---------------------------------------------------------------------------------------------

    def _complete(self, segment: SealedSegment) -> None:
        """Make the file of a closed segment whole."""
        number, active = segment.number, self._active
        file = self._open(number)
        if file is None or not self._finish(file, segment, active):
            file = self._create(number)
            try:
                self._fetch(file, segment, 0, 0)
            finally:
                file.close()
            self._give_name(number)
        self._here.add(number)
        self._closed.add(number)
        self._active = None

    def _finish(self, file: File, segment: SealedSegment, active: ActivePart | None) -> bool:
        """Whether a file that is there is that segment, or becomes it by what is not in slots. Closes the file."""
        try:
            if self._is_whole(file, segment):
                return True
            if active is None or active.number != segment.number:
                return False
            self._fetch(file, segment, active.end, active.crc)
        except StoreDamaged:  # unless it is the beginning that is wrong
            self._active = None
            return False
        finally:
            file.close()
        return True

    def _open(self, number: int) -> File | None:
        """The file of a segment; ``None`` if it is not there."""
        with contextlib.suppress(FileNotFoundError):
            return self.directory.open(file_names.segment_name(self.queue, number), write=True)
        return None

    def _create(self, number: int) -> File:
        """A file of a segment. Until it has something on disk it is called new: nobody takes it for more (R1)."""
        name = file_names.new_segment_name(self.queue, number)
        with contextlib.suppress(FileNotFoundError):
            self.directory.unlink(name)
        self._unnamed.add(number)
        return self.directory.create(name)

    def _give_name(self, number: int) -> None:
        names = file_names.new_segment_name(self.queue, number), file_names.segment_name(self.queue, number)
        self.directory.rename(*names)
        self.directory.sync()
        self._unnamed.discard(number)

    @staticmethod
    def _is_whole(file: File, segment: SealedSegment) -> bool:
        """Whether the file is that segment. What is only in the page cache is written first, or does not count."""
        file.sync()
        file.forget()
        size = file.size()
        if size != segment.file_bytes or file.read(0, fmt.HEADER_BYTES) != segment.header:
            return False
        return file.read(size - fmt.FOOTER_BYTES, fmt.FOOTER_BYTES) == segment.footer

    def _fetch(self, file: File, segment: SealedSegment, start: int, crc: int) -> None:
        """Fetch the bytes of a segment from ``start`` on. Its footer is written when all the rest is on disk, and only
        if the crc of all is that of the SEAL.
        """
        if file.size() > start:
            file.truncate(start)
            file.sync()  # an old footer must not be there beside new bytes
        at, held = start, b""
        for part in self._shipped.segment_parts(segment, start, crc):
            data = held + part
            here = max(0, min(len(data), segment.file_bytes - fmt.FOOTER_BYTES - at))
            file.write(at, data[:here])
            at, held = at + here, data[here:]
        file.sync()
        file.write(at, held)
        file.sync()

    # -- the active segment ------------------------------------------------------------------------------------------

    def _extend(self, state: LogState) -> None:
        """Write the bytes of the active segment that are in the log and not here."""
        place = state.place
        if self._active is not None and self._active[:2] == (place.number, place.offset):
            return
        there = self._open(place.number)
        file = there if there is not None else self._create(place.number)
        try:
            if there is None:
                self._active = ActivePart(place.number, 0, 0)
            elif self._active is None or self._active.number != place.number:
                self._active = self._part_here(file, state)
            assert self._active is not None
            end, crc = self._append(file, state, self._active)
            file.sync()
        finally:
            file.close()
        if there is None:
            self._give_name(place.number)
        self._here.add(place.number)
        self._active = ActivePart(place.number, end, crc)

    def _part_here(self, file: File, state: LogState) -> ActivePart:
        """How much of the active segment is here as it is in the log. The rest is cut off."""
        place = state.place
        file.sync()
        file.forget()
        end, crc = place.offset, self._crc(file, place.offset)
        if file.size() < end or crc != place.segment_crc:
            end = crc = 0
            for number, offset, _ in state.tail:
                frames = self._slot(number).frames
                if offset != end or file.read(offset, len(frames)) != frames:
                    break
                end, crc = end + len(frames), crc32(frames, crc)
        if file.size() > end:
            file.truncate(end)
        return ActivePart(place.number, end, crc)

    @staticmethod
    def _crc(file: File, end: int) -> int:
        crc = 0
        for at in range(0, end, _READ_BYTES):
            crc = crc32(file.read(at, min(_READ_BYTES, end - at)), crc)
        return crc

    def _append(self, file: File, state: LogState, active: ActivePart) -> tuple[int, int]:
        """Write the frames of the slots from the end of what is here on. Returns where they end, and the crc."""
        assert state.header is not None
        place, end, crc = state.place, active.end, active.crc
        for number, offset, first_id in state.tail:
            if offset < end:
                continue
            slot = self._slot(number)
            header = slot.header
            crc = crc32(slot.frames, crc)
            said = (header.queue_id, header.number, header.marker, header.offset, header.first_id, header.segment_crc)
            if said != (state.header.queue_id, place.number, place.marker, end, first_id, crc):
                raise self._shipped.damage(slot_key(number), "it is not the slot that the log names", number - 1)
            file.write(end, slot.frames)
            end += len(slot.frames)
        if (end, crc) != (place.offset, place.segment_crc):
            raise self._shipped.damage(slot_key(state.slot), "the active segment is not the one in the log")
        return end, crc

    def _slot(self, number: int) -> Slot:
        recent = self.recent.get(number)
        return recent if recent is not None else self._shipped.slot_there(number)

    # -- what is beside it -------------------------------------------------------------------------------------------

    def _save_states(self, state: LogState) -> None:
        """Save the checkpoints and the ledger that are in the log; remove those that are not."""
        if not self._is_known and self._shipped.of_jobs:
            renew_mark(self.directory, self.queue)  # an owner that was here may have noted deletes in it
        for reader, saved in sorted(state.checkpoints.items()):
            if self._saved.get(reader) == saved:
                continue
            if reader not in self._savers:
                self.files.lock_reader(reader).release()  # see ``restoring``: a reader that was owned has a lock file
                self._savers[reader] = self.files.checkpoint_file(reader)
            self._savers[reader].save(saved, durable=True)
            self._saved[reader] = saved
        here = set(self._saved)
        if not self._is_known:
            names = self.directory.names()
            here |= self.files.reader_names(names) | file_names.owned_among(names, self.queue)
        for reader in sorted(here - state.checkpoints.keys()):
            self.files.drop(reader)
            self._saved.pop(reader, None)
            self._savers.pop(reader, None)
        if state.ledger != self._ledger or not self._is_known:
            self._save_ledger(state.ledger)

    def _save_ledger(self, ledger: ShippedLedger | None) -> None:
        name = file_names.ledger_name(self.queue)
        try:
            folder = open_inbox(self.directory.path, self._disk, create=ledger is not None)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            if ledger is not None:
                replace_file(folder, name, ledger.file())
            else:
                with contextlib.suppress(FileNotFoundError):
                    folder.unlink(name)
                    folder.sync()
        finally:
            folder.close()
        self._ledger = ledger

    def _save_mark(self, state: LogState) -> None:
        """Save the mark at each segment, and in each epoch, and note how far the files have come: to do that for each
        slot would cost more than the slot.
        """
        assert state.header is not None
        mark = (state.header.epoch, state.place.number, len(state.segments))
        if mark != self._marked:
            self.save_mark(state)
            self._marked = mark
            if self._is_known:
                self.note(state)

    def save_mark(self, state: LogState) -> None:
        """The mark says that everything up to ``state`` is on disk here. Raises as ``bring_to``."""
        assert state.header is not None
        if self._given_out[0] != state.header.epoch:
            self._given_out = state.header.epoch, self._shipped.given_out(state)
        write_restored_mark(self.directory, self.queue, state, self._given_out[1])

    def _remove_old(self, wanted: set[int]) -> None:
        """Remove the segments that nobody needs, and those that are not of the log."""
        if self._is_known:
            old = [file_names.segment_name(self.queue, number) for number in sorted(self._here - wanted)]
            old += [file_names.new_segment_name(self.queue, number) for number in sorted(self._unnamed)]
            self._unnamed.clear()
        else:
            stays = {file_names.segment_name(self.queue, number) for number in wanted}
            names = sorted(self.directory.names())  # a new file beside one of that number, too
            old = [each for each in names if file_names.parse_segment(each, self.queue) is not None]
            old = [each for each in old if each not in stays]
        for name in old:
            with contextlib.suppress(FileNotFoundError):
                self.directory.unlink(name)
        if old:
            self.directory.sync()
        self._here &= wanted
        self._closed &= wanted

    def _check(self) -> None:
        """Assert the invariants."""
        assert self._closed <= self._here or not self._is_known
        assert self._active is None or self._active.number not in self._closed
