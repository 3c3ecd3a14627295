"""Real queues, shipped without the owner's thread: their files are read from the folder, and appended slot by slot."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from random import Random
from typing import Any, NamedTuple
from zlib import crc32

from kestrelpy._journal import format as fmt
from kestrelpy._journal.checkpoint import load_checkpoint
from kestrelpy._journal.file_names import checkpoint_name, readers_among, segments_among
from kestrelpy._journal.segment import iterate_frames
from kestrelpy.inbox.ledger import read_ledger
from kestrelpy.ship import Store, log
from kestrelpy.ship import manifest as manifests
from kestrelpy.ship import slots as codec
from kestrelpy.ship.identity import IDENTITY_KEY, QueueIdentity, encode_identity
from kestrelpy.ship.log import Opening, carry_out
from kestrelpy.ship.manifest import LogState
from kestrelpy.ship.slots import (
    CLOSE,
    DATA,
    SEAL,
    DroppedReader,
    SavedState,
    SealedSegment,
    ShippedLedger,
    Slot,
    SlotHeader,
)

QUEUE, FOLDER, ARCHIVE = "jobs", "/queues", "/archive"


class Moment(NamedTuple):
    """What the log adds up to at a slot, for comparison."""

    slot: int
    written_ms: int
    last_id: int
    checkpoints: dict[str, fmt.Checkpoint]


class Shipper:
    """Ships ``queue`` of ``disk`` whenever ``ship`` is called: what is new in its files by then. Segments that were
    archived meanwhile are looked for in ``ARCHIVE``: nothing here keeps the queue from retiring them.

    ``moments``: one for each slot. ``items``: every item that is in the log, by id.
    """

    def __init__(self, store: Store, disk: Any, *, queue: str = QUEUE, folder: str = FOLDER, seed: int = 0) -> None:
        self.store = store
        self.random = Random(seed)
        self.folder = disk.directory(folder)
        self._disk = disk
        self.queue = queue
        self.prefix = f"{queue}/"
        self.written_ms = 1_700_000_000_000
        self.moments: list[Moment] = []
        self.items: dict[int, bytes] = {}
        self.state = LogState()
        self.opening: Opening
        self._epochs = 0
        self._last_states: dict[str, fmt.Checkpoint] = {}
        self._taken = 0

    # -- what an owner does ------------------------------------------------------------------------------------------

    def fence(self, *, gap: int = 0, lease_ms: int = 0) -> None:
        self._epochs += 1
        queue_id = self._queue_id()
        identity = QueueIdentity(self.queue, queue_id, self.written_ms)
        self.store.create(self.prefix + IDENTITY_KEY, encode_identity(identity))
        nonce = self.random.randbytes(16)
        self.opening = Opening(queue_id, nonce, f"host:{self._epochs}", lease_ms, self._tick())
        steps = log.open_log(self.prefix, self.opening, lambda state: state.last_id + 1 + gap)
        self.state = carry_out(steps, self.store, bool)
        self._note()

    def ship(self, *, most: int = 1 << 30, seals_alone: bool = False) -> None:
        """Append what is new: DATA with at most so many frames each, SEALs, and the checkpoints that the log covers.
        ``seals_alone``: of a segment that is closed and of which nothing is in the log, there is no DATA.
        """
        for number, (folder, name) in self._segments():
            if self.state.segments and number <= self.state.segments[-1].number:
                continue
            file = folder.open(name)
            try:
                self._ship_segment(file, most, seals_alone=seals_alone)
            finally:
                file.close()
        if self._states():
            self.append(DATA, checkpoints=self._states())

    def _ship_segment(self, file: Any, most: int, *, seals_alone: bool) -> None:
        header = fmt.decode_header(file.read(0, fmt.HEADER_BYTES))
        assert header is not None
        data = file.read(0, file.size())
        frames = list(iterate_frames(file, header.marker, fmt.HEADER_BYTES, len(data)))
        footer = frames.pop()[1].footer if frames and frames[-1][1].footer is not None else None
        if not (footer is not None and seals_alone and not self.state.tail):
            begun = self.state.place.offset if self.state.tail else 0
            new = [(at, frame) for at, frame in frames if at >= begun]
            while new:  # a segment without a frame may be removed by the next opening
                some, new = new[:most], new[most:]
                end = some[-1][0] + some[-1][1].size
                begun = self.state.place.offset if self.state.tail else 0
                ids = {"first_id": some[0][1].first_id, "last_id": some[-1][1].last_id}
                self._note_items(some)
                self.append(DATA, data[begun:end], header=header, offset=begun, **ids)
        if footer is not None:
            self._note_items(frames)
            self.seal(header, footer, data)

    def ship_as_they_are(self) -> None:
        """Append a SEAL for each segment, whatever is in it; its footer is whole."""
        for _, (folder, name) in self._segments():
            file = folder.open(name)
            data = file.read(0, file.size())
            marker = int.from_bytes(data[-fmt.FOOTER_BYTES :][fmt.MARKER_OFFSET : fmt.FRAME_BYTES], "little")
            frame = fmt.decode_frame(data, len(data) - fmt.FOOTER_BYTES, marker)
            assert frame is not None
            assert frame.footer is not None
            number = fmt.footer_number(data[-fmt.FOOTER_BYTES :])
            about = fmt.SegmentHeader(marker, self.opening.queue_id, number, frame.footer.first_id, 0, 0, 0, 0, 0)
            self.seal(about, frame.footer, data)

    def _note_items(self, frames: Iterable[tuple[int, fmt.Frame]]) -> None:
        for _, frame in frames:
            self.items.update((frame.first_id + at, entry[0]) for at, entry in enumerate(frame.entries))

    def seal(self, header: fmt.SegmentHeader, footer: fmt.SegmentFooter, data: bytes) -> None:
        assert self.state.header is not None
        key = codec.segment_key(header.number, self.state.header.epoch, self.opening.nonce)
        self.store.create(self.prefix + key, data)
        sealed = SealedSegment(key, len(data), crc32(data), data[: fmt.HEADER_BYTES], data[-fmt.FOOTER_BYTES :])
        self.append(
            SEAL, header=header, first_id=footer.first_id, last_id=footer.last_id, offset=footer.records_end,
            crc=crc32(data[: footer.records_end]), note=codec.encode_sealed(sealed),
        )  # fmt: skip

    def append(
        self,
        kind: int,
        frames: bytes = b"",
        *,
        header: fmt.SegmentHeader | None = None,
        first_id: int = 0,
        last_id: int = 0,
        offset: int = 0,
        crc: int | None = None,
        **more: Any,
    ) -> None:
        about = log.empty_header(self.state, kind, self.opening._replace(written_ms=self._tick()))
        if header is not None:
            before = self.state.place.segment_crc if self.state.tail else 0
            about = about._replace(
                number=header.number, marker=header.marker, offset=offset, length=len(frames),
                segment_crc=crc32(frames, before) if crc is None else crc, first_id=first_id, last_id=last_id,
            )  # fmt: skip
        more.setdefault("checkpoints", ())
        if kind in (DATA, CLOSE):
            more.setdefault("ledger", self._ledger())
        carry_out(log.append(self.prefix, self.state, Slot(about, frames, **more)), self.store, bool)
        for state in more["checkpoints"]:
            if isinstance(state, DroppedReader):
                self._last_states.pop(state.reader, None)
            else:
                self._last_states[state.reader] = state
        self._note()

    def close(self) -> None:
        self.append(CLOSE, note=codec.close_note(handed_over=False), checkpoints=self._states())

    def manifest(self) -> None:
        data = manifests.encode_manifest(self.state.manifest())
        self.store.create(self.prefix + manifests.manifest_key(self.state.slot), data)

    def forget_below(self, number: int) -> None:
        self.append(DATA, note=codec.forget_note(number))

    # -- what there is -----------------------------------------------------------------------------------------------

    def _tick(self) -> int:
        self.written_ms += self.random.choice((0, 1, 500))
        return self.written_ms

    def _note(self) -> None:
        header: SlotHeader | None = self.state.header
        assert header is not None
        self.moments.append(Moment(header.slot, header.written_ms, header.last_id, dict(self.state.checkpoints)))

    def _segments(self) -> list[tuple[int, tuple[Any, str]]]:
        found: dict[int, tuple[Any, str]] = {}
        for path in (ARCHIVE, self.folder.path):
            with contextlib.suppress(FileNotFoundError):
                folder = self._disk.directory(path)
                found.update((number, (folder, name)) for number, name in segments_among(folder.names(), self.queue))
        return sorted(found.items(), key=lambda each: each[0])

    def _queue_id(self) -> bytes:
        for _, (folder, name) in self._segments():
            file = folder.open(name)
            header = fmt.decode_header(file.read(0, fmt.HEADER_BYTES))
            file.close()
            if header is not None:
                return header.queue_id
        raise AssertionError("nothing is there to be shipped")

    def _states(self) -> tuple[SavedState, ...]:
        """The checkpoints that are new, and that the log covers."""
        there = readers_among(self.folder.names(), self.queue)
        found: list[SavedState] = [DroppedReader(name) for name in sorted(self._last_states.keys() - there)]
        for reader in sorted(there):
            state, _ = load_checkpoint(self.folder, checkpoint_name(self.queue, reader))
            if state is None:
                continue
            state = state._replace(reader=reader)
            covered = max(state.highest_id, state.watermark) <= self.state.last_id
            if covered and self._last_states.get(reader) != state:
                found.append(state)
        return tuple(found)

    def _ledger(self) -> ShippedLedger | None:
        try:
            folder = self._disk.directory(f"{self.folder.path}/inbox")
        except FileNotFoundError:
            return None
        try:
            state, end, _ = read_ledger(folder, self.queue)
        finally:
            folder.close()
        return ShippedLedger.of(0, state) if end else None
