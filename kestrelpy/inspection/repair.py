"""Repairing a queue's files: what ``on_corruption="quarantine"`` skips is taken out of them, once and for all.

Rules:
1. Only what is damaged is lost: every intact item stays, under its id.
2. Every byte that does not count any more is kept aside, where quarantine keeps it.
3. No reader's place moves over an item that is there. A reader whose checkpoint is damaged begins with the earliest
   item.
4. A batch from the inbox is in the journal as a whole, or not at all.
5. The steps are in ``repair_files``; after a kill or a power cut, the next repair finishes them.
6. A shipped queue is refused: its log has the intact bytes, and a journal that differs from its log is never opened.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
from collections.abc import Callable, Container, Iterator
from typing import NamedTuple

from kestrelpy._disk.interface import NO_ROOM, Directory, Disk, StrPath
from kestrelpy._disk.real import RealDisk
from kestrelpy._journal import file_names
from kestrelpy._journal import format as fmt
from kestrelpy._journal.checkpoint import load_checkpoint
from kestrelpy._journal.purpose import JOBS, kind_of
from kestrelpy._journal.queue_files import QueueFiles, is_checkpoint_of
from kestrelpy._journal.recovery import MOST_LOST, claimed_at, why_tail_impossible
from kestrelpy._journal.salvage import BadBytes, Salvage, SalvagedSegment
from kestrelpy._journal.segment import iterate_frames
from kestrelpy._journal.small_files import read_small
from kestrelpy.clock import Clock, SystemClock
from kestrelpy.errors import CorruptJournal, QueueDiskFull, RepairRefused
from kestrelpy.inspection.archive_check import ARCHIVE, is_archive, look_at_archive
from kestrelpy.inspection.inbox_check import InboxRepair
from kestrelpy.inspection.repair_files import RepairStage, RepairSteps, apply_steps, bytes_left, commit, read_steps
from kestrelpy.inspection.repair_plan import NewSegment, RepairPlan
from kestrelpy.inspection.repair_report import JobDoubts, RepairLoss, RepairReport
from kestrelpy.inspection.strange_files import WHY_NOT_READ, strange_files

_MOST_SMALL_BYTES = 64 << 20
"""A checkpoint is not larger."""


class Records(NamedTuple):
    """The records of a work queue that are not committed, for whoever knows what they say. ``items``: id and data, or
    ``None`` for a record that is lost. ``marks``: the content of the file that marks the queue.
    """

    items: Iterator[tuple[int, bytes | None]]
    queue_id: bytes
    marks: bytes
    path: str


Judge = Callable[[Records], tuple[JobDoubts, bytes]]
"""Says which jobs are in doubt, and gives a record to be added: by it, no id of a lost job is given out again."""


class _Readers(NamedTuple):
    """The checkpoints and the mark of a queue: the whole ``states``, and why files among them are ``damaged``."""

    states: dict[str, fmt.Checkpoint]
    damaged: dict[str, tuple[int, str]]
    names: dict[str, str]
    """The reader of each checkpoint, by the name of its file."""


class QueueRepair:
    """One repair of one queue. ``judge``: for work queues. ``now_ms``: the time of a record that is added."""

    def __init__(
        self,
        folder: Directory,
        queue: str,
        disk: Disk,
        judge: Judge,
        randomness: Callable[[int], bytes],
        now_ms: int,
    ) -> None:
        self._folder = folder
        self._queue = queue
        self._disk = disk
        self._judge = judge
        self._randomness = randomness
        self._now_ms = now_ms
        self._files = QueueFiles(folder, queue)
        self._names: list[str] = []
        self._is_archive = False
        self._taken: set[str] = set()
        self._kept: dict[str, bytes] = {}
        self._losses: list[RepairLoss] = []

    def run(self, *, dry_run: bool) -> RepairReport:
        """Repair the queue, or say what a repair would do. Raises as ``repair``."""
        names = self._folder.names()
        file_names.refuse_unrestored(names, self._queue, self._folder.path, repairing=True)
        file_names.refuse_standby(names, self._queue, self._folder.path)
        for name in strange_files(self._folder, self._queue):
            raise RepairRefused(self._path, f"{name}: {WHY_NOT_READ}. Put the file itself there, or move this away")
        self._is_archive = is_archive(self._folder, names, self._queue)
        if dry_run:
            return self._with_past(self._past(names), dry_run=True)
        with contextlib.ExitStack() as held:
            if self._is_archive:
                return self._locked(names)
            lock, names = self._files.lock(repairing=True)
            held.callback(lock.release)
            held.enter_context(self._files.guard(wait=False))
            for reader in sorted(file_names.owned_among(names, self._queue)):  # the others have never had an owner
                held.callback(self._files.lock_reader(reader).release)
            return self._locked(names)

    def _locked(self, names: list[str]) -> RepairReport:
        past = self._past(names)
        if past is not None:
            apply_steps(self._files, past)
        return self._with_past(past, dry_run=False)

    def _past(self, names: list[str]) -> RepairSteps | None:
        """What a repair that was cut short has still to do."""
        return read_steps(self._folder, self._queue) if file_names.repair_name(self._queue) in names else None

    def _with_past(self, past: RepairSteps | None, *, dry_run: bool) -> RepairReport:
        if past is not None and dry_run:  # what else there is shows when that is done
            return _report_of(past, dry_run=True)
        self._names = file_names.of_queue(self._folder.names(), self._queue)
        report = self._repair(dry_run=dry_run)
        if past is None:
            return report
        before = _report_of(past, dry_run=False)
        return RepairReport(
            queue=report.queue,
            kind=report.kind,
            losses=(*before.losses, *report.losses),
            reset_readers=(*before.reset_readers, *report.reset_readers),
            refused_batches=report.refused_batches,
            jobs=report.jobs or before.jobs,
            resumed=True,
        )

    # -- looking -----------------------------------------------------------------------------------------------------

    def _repair(self, *, dry_run: bool) -> RepairReport:
        """Look at everything, and repair it unless this is a ``dry_run``."""
        self._taken = set(self._names)
        if self._is_archive:
            return self._repair_archive(dry_run=dry_run)
        kind = kind_of(self._names, self._queue)
        readers = self._look_at_readers()
        salvage = self._salvage(readers)
        inbox = InboxRepair(self._folder.path, self._queue, self._disk, salvage)
        try:
            inbox.look()
            doubts, record = self._doubts(salvage, readers, kind)
            steps, made = RepairSteps(), self._plan_segments(salvage, record)
            self._add_segments(steps, salvage, made)
            self._add_states(steps, salvage, made, readers)
            if steps:
                self._add_twins(steps)
            report = RepairReport(
                queue=self._queue,
                kind=kind,
                losses=(*self._losses, *inbox.losses),
                reset_readers=tuple(sorted(steps.readers)),
                refused_batches=inbox.refused,
                jobs=doubts,
                dry_run=dry_run,
            )
            if steps and file_names.ship_name(self._queue) in self._names:
                raise RepairRefused(self._path, _SHIPPED)
            if not dry_run:
                self._write(steps, made.made, report)
                inbox.write()
            return report
        finally:
            inbox.close()

    def _repair_archive(self, *, dry_run: bool) -> RepairReport:
        steps, made = RepairSteps(), []
        for salvage in look_at_archive(self._folder, self._queue, self._names):
            plan = self._plan_segments(salvage, None)
            self._add_segments(steps, salvage, plan)
            made += plan.made
        report = RepairReport(queue=self._queue, kind=ARCHIVE, losses=tuple(self._losses), dry_run=dry_run)
        if not dry_run:
            self._write(steps, made, report)
        return report

    def _plan_segments(self, salvage: Salvage, record: bytes | None) -> RepairPlan:
        numbers = [number for number, _ in file_names.segments_among(self._names, self._queue)]
        return RepairPlan(salvage, self._path, numbers, is_archive=self._is_archive, record=record)

    @property
    def _path(self) -> str:
        return f"{self._folder.path}/{self._queue}"

    def _look_at_readers(self) -> _Readers:
        """Read the checkpoints and the mark. Raises ``UnsupportedFormat``, ``OSError``."""
        queue, states, damaged = self._queue, {}, {}
        readers = {
            file_names.checkpoint_name(queue, reader): reader
            for reader in sorted(file_names.readers_among(self._names, queue))
        }
        for name in (file_names.mark_name(queue), *readers):
            state, exists = load_checkpoint(self._folder, name)
            if state is not None:
                states[name] = state
            elif exists:
                damaged[name] = (0, "no whole state in this checkpoint")
        return _Readers(states, damaged, readers)

    def _salvage(self, readers: _Readers) -> Salvage:
        """Look at the segments. A state of another queue, or one that claims ids out of reach, does not count."""
        while True:
            states = [state for name, state in readers.states.items() if name not in readers.damaged]
            salvage = Salvage(self._folder, self._queue, states)
            salvage.run(self._names)
            if not self._find_wrong(readers, salvage):
                return salvage

    def _find_wrong(self, readers: _Readers, salvage: Salvage) -> bool:
        """Note states that are not this queue's. Returns whether one of them counted."""
        found = False
        for name, state in readers.states.items():
            if name in readers.damaged:
                continue
            reader = readers.names.get(name)  # none: the mark
            if reader is None:
                is_ours = state.queue_id == salvage.queue_id
            else:
                is_ours = is_checkpoint_of(state, reader, salvage.queue_id)
            if not is_ours:
                is_other = state.queue_id != salvage.queue_id
                whose = "belongs to another queue" if is_other else "is another reader's"
                readers.damaged[name] = (0, f"this checkpoint {whose}")
                found = found or not is_other
        last = salvage.segments[-1] if salvage.segments else None
        known = 0 if last is None else max(last.first_id - 1, last.runs[-1].last_id if last.runs else 0)
        reason = why_tail_impossible(salvage.tail_id, known, None if last is None else last.as_segment())
        if reason is None:
            return found
        states = {name: state for name, state in readers.states.items() if name not in readers.damaged}
        far = [name for name, state in states.items() if max(state.highest_id, state.watermark) > known + MOST_LOST]
        if not far:
            segments = [] if last is None else [last.as_segment()]
            claimed = claimed_at(self._folder, self._queue, salvage.queue_id, salvage.tail_id, segments)
            name, at = claimed or (file_names.mark_name(self._queue), 0)
            raise CorruptJournal(f"{self._folder.path}/{name}", at, reason)
        readers.damaged.update(dict.fromkeys(far, (0, reason)))
        return True

    def _doubts(self, salvage: Salvage, readers: _Readers, kind: str) -> tuple[JobDoubts | None, bytes | None]:
        """Of a work queue that has lost records: which jobs are in doubt, and the record to be added."""
        own = file_names.checkpoint_name(self._queue, "")
        state = readers.states.get(own) if own not in readers.damaged else None
        head, done = (state.head, state.done) if state is not None else (0, ())
        lost = [(bad.first_id, bad.last_id) for bad in salvage.all_bad() if bad.last_id > head]
        if kind != JOBS or not lost:
            return None, None
        marks = read_small(self._folder, file_names.work_name(self._queue), _MOST_SMALL_BYTES) or b""
        items = _records_of(self._folder, salvage.segments, sorted(lost), head, done)
        return self._judge(Records(items, salvage.queue_id, marks, self._path))

    # -- planning ----------------------------------------------------------------------------------------------------

    def _add_segments(self, steps: RepairSteps, salvage: Salvage, plan: RepairPlan) -> None:
        """Add to ``steps`` what has to be done with segments, and note what is lost by it."""
        places: dict[str, list[tuple[int, int, str]]] = {}
        for number, name in salvage.foreign:
            new = self._free_name(number)
            steps.moves.append((name, new))
            places[name] = [(0, fmt.LARGEST, new)]
        for segment in plan.replaced:
            places[segment.name] = self._keep_left(segment)
        self._losses += [self._loss_of(bad, places.get(bad.name, [])) for bad in salvage.all_bad()]
        mine = {each.name for each in plan.replaced}
        installs = [self._segment_name(new.header, mine) for new in plan.made]
        steps.installs += installs
        steps.removes += [each.name for each in plan.replaced if each.name not in installs]

    def _segment_name(self, header: fmt.SegmentHeader, mine: Container[str]) -> str:
        """The name of a new segment. In an archive, the file of that name may be another queue's; ``mine`` are not."""
        name = file_names.segment_name(self._queue, header.number)
        if self._is_archive and name in self._names and name not in mine:
            return file_names.archived_name(self._queue, header.number, header.queue_id)
        return name

    def _add_twins(self, steps: RepairSteps) -> None:
        """Set aside new segments whose lasting name another file has. They do not count now, and never may."""
        for name in self._names:
            number = file_names.parse_segment(name, self._queue)
            if number is not None and file_names.is_new(name) and file_names.lasting_name(name) in self._names:
                steps.moves.append((name, self._free_name(number)))

    def _add_states(self, steps: RepairSteps, salvage: Salvage, plan: RepairPlan, readers: _Readers) -> None:
        """Add to ``steps`` what has to be done with checkpoints and the mark."""
        on_disk = max(salvage.watermark, plan.made[-1].last_id if plan.made else 0)
        for name, (offset, reason) in sorted(readers.damaged.items()):
            is_foreign = name in readers.states and readers.states[name].queue_id != salvage.queue_id
            reader = readers.names.get(name)
            kept = self._plan_reader(steps, name, reader, plan, on_disk, is_foreign=is_foreign)
            path, size = self._path_of(name), len(self._kept[kept])
            self._losses.append(RepairLoss(path, offset, size, reason, kept=self._path_of(kept)))
        if steps and salvage.queue_id and plan.tail_id:
            steps.mark = (salvage.queue_id.hex(), plan.tail_id, min(on_disk, plan.tail_id))

    def _plan_reader(
        self, steps: RepairSteps, name: str, reader: str | None, plan: RepairPlan, on_disk: int, *, is_foreign: bool
    ) -> str:
        """Keep a damaged checkpoint or mark aside; returns where. Its reader begins with the earliest item, unless the
        file is of another queue, and no reader of that name ever had an owner.
        """
        data = read_small(self._folder, name, _MOST_SMALL_BYTES) or b""
        number = 1
        while file_names.damaged_name(name, number) in self._taken:
            number += 1
        kept = file_names.damaged_name(name, number)
        self._kept[kept] = data.rstrip(b"\0")
        self._taken.add(kept)
        if reader is None or (is_foreign and reader not in file_names.owned_among(self._names, self._queue)):
            steps.removes.append(name)
            return kept
        items, size = plan.base
        head = plan.first_id - 1
        state = fmt.Checkpoint(plan.queue_id or bytes(16), reader, head, min(on_disk, plan.tail_id), items, size)
        steps.readers[reader] = fmt.encode_checkpoint_body(state).hex()
        return kept

    def _keep_left(self, segment: SalvagedSegment) -> list[tuple[int, int, str]]:
        """Keep aside what is left of a segment. Returns where each place begins and ends, and the name of its file."""
        places = []
        file = self._folder.open(segment.name)
        try:
            for offset, data in bytes_left(file, segment):
                places.append((offset, offset + len(data), self._name_for(segment.number, offset, data)))
        finally:
            file.close()
        return places

    def _name_for(self, number: int, offset: int, data: bytes) -> str:
        """The name of the file for these bytes: one that has them already, or that was cut short, or that is free."""
        while True:
            name = file_names.quarantine_name(self._queue, number, offset)
            there = None
            if name in self._names:
                there = read_small(self._folder, name, len(data))
            if there == data:
                return name
            if name not in self._taken or (there is not None and data.startswith(there)):
                self._kept[name] = data
                self._taken.add(name)
                return name
            offset += 1

    def _free_name(self, number: int) -> str:
        offset = 0
        while (name := file_names.quarantine_name(self._queue, number, offset)) in self._taken:
            offset += 1
        self._taken.add(name)
        return name

    def _path_of(self, name: str) -> str:
        return f"{self._folder.path}/{name}"

    def _loss_of(self, bad: BadBytes, places: list[tuple[int, int, str]]) -> RepairLoss:
        kept = next(
            (name for first, end, name in places if first < bad.offset + max(bad.size, 1) and bad.offset < end), ""
        )
        return RepairLoss(
            self._path_of(bad.name),
            bad.offset,
            bad.size,
            bad.reason,
            bad.first_id,
            bad.last_id,
            self._path_of(kept) if kept else "",
        )

    # -- writing -----------------------------------------------------------------------------------------------------

    def _write(self, steps: RepairSteps, made: list[NewSegment], report: RepairReport) -> None:
        """Do it all. Raises ``QueueDiskFull`` and ``OSError``, with nothing changed or with the rest to be resumed."""
        if not steps:
            return
        steps.found = _as_facts(report)
        stage = RepairStage(self._folder)
        try:
            for name, data in self._kept.items():
                stage.keep(name, data)
            for name, new in zip(steps.installs, made, strict=True):
                stage.write(name, new, self._randomness, self._now_ms)
            commit(self._files, steps)
        except OSError as error:
            if file_names.repair_name(self._queue) not in self._folder.names():
                stage.discard()
            if error.errno not in NO_ROOM:
                raise
            raise QueueDiskFull(self._folder.path) from error
        apply_steps(self._files, steps)


_SHIPPED = (
    "it is shipped, and its log in the store has what is damaged here; a repair here would make another history. "
    "Restore it from the store into another folder (kestrelpy restore), or let it be shipped no more (kestrelpy ship "
    "detach), and repair it then"
)


def _records_of(
    folder: Directory,
    segments: list[SalvagedSegment],
    lost: list[tuple[int, int]],
    head: int,
    done: tuple[tuple[int, int], ...],
) -> Iterator[tuple[int, bytes | None]]:
    """The records after ``head`` that are not done, in order; ``None`` for those that are lost."""
    gone = ((each, None) for first, last in lost for each in range(max(first, head + 1), last + 1))
    there = (pair for segment in segments for pair in _items_of(folder, segment))
    for item_id, data in heapq.merge(gone, there, key=_id_of):
        if item_id > head and not any(first <= item_id <= last for first, last in done):
            yield item_id, data


def _id_of(pair: tuple[int, bytes | None]) -> int:
    return pair[0]


def _items_of(folder: Directory, segment: SalvagedSegment) -> Iterator[tuple[int, bytes | None]]:
    """The items that are left of a segment."""
    file = folder.open(segment.name)
    try:
        for run in segment.runs:
            for _, frame in iterate_frames(file, segment.header.marker, run.offset, run.end):
                items = enumerate(frame.entries, frame.first_id)
                yield from ((item_id, entry[0]) for item_id, entry in items if item_id <= run.last_id)
    finally:
        file.close()


def _as_facts(report: RepairReport) -> dict[str, object]:
    """What whoever resumes has to say of a report."""
    return {
        "queue": report.queue,
        "kind": report.kind,
        "losses": [[getattr(loss, name) for name in _LOSS] for loss in report.losses],
        "reset_readers": list(report.reset_readers),
        "jobs": None if report.jobs is None else [list(report.jobs.missing), list(report.jobs.doubtful)],
    }


_LOSS = ("path", "offset", "size", "reason", "first_id", "last_id", "kept")


def _report_of(steps: RepairSteps, *, dry_run: bool) -> RepairReport:
    found = steps.found
    jobs = found["jobs"]
    return RepairReport(
        queue=found["queue"],
        kind=found["kind"],
        losses=tuple(RepairLoss(*each) for each in found["losses"]),
        reset_readers=tuple(found["reset_readers"]),
        jobs=None if jobs is None else JobDoubts(missing=_spans(jobs[0]), doubtful=_spans(jobs[1])),
        resumed=True,
        dry_run=dry_run,
    )


def _spans(found: list[list[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((first, last) for first, last in found)


def repair(
    directory: StrPath, name: str, *, dry_run: bool = False, disk: Disk | None = None, clock: Clock | None = None
) -> RepairReport:
    """Make a queue that is damaged one that opens with ``on_corruption="raise"`` and verifies. Returns what is lost.

    Every intact item stays, under its id. The bytes that do not count any more are kept aside, in files named
    ``*.quarantine`` and ``*.damaged`` beside the queue's. No reader's place moves over an item that is there; a reader
    whose checkpoint is damaged begins with the earliest item. Of the inbox, a damaged batch is kept aside as a whole.
    Of a work queue that has lost records, ``jobs`` of the report says which jobs are in doubt. ``directory`` may be an
    archive, too. A torn tail is no damage. If nothing is damaged, nothing is written.

    With ``dry_run`` nothing is written and no lock is taken, and the report is the same. Else the queue and its readers
    are locked meanwhile. If this is cut short, nobody opens the queue (``RepairIncomplete``) until a second call has
    finished it. On a full disk, ``QueueDiskFull`` is raised, with nothing changed.

    Raises ``QueueLocked``, ``RepairRefused`` for a queue that is shipped, or of which a file is no regular file (a
    link, a folder), ``RestoreIncomplete``, ``UnsupportedFormat``, ``CorruptJournal`` if the files make no sense to any
    opening, ``InvalidName``, ``FileNotFoundError`` if the folder has no such queue, ``OSError``. Cost: all bytes are
    read; damaged segments are written again.
    """
    file_names.check_name(name)
    now_ms = (clock or SystemClock()).time_ns() // 1_000_000
    chosen = disk or RealDisk()
    folder = chosen.directory(os.fspath(directory))
    try:
        if not file_names.but_for_locks(folder.names(), name):
            raise FileNotFoundError(errno.ENOENT, f"no queue {name!r} is here", folder.path)
        return QueueRepair(folder, name, chosen, _judge, os.urandom, now_ms).run(dry_run=dry_run)
    finally:
        folder.close()


def _judge(records: Records) -> tuple[JobDoubts, bytes]:
    from kestrelpy.work.doubts import jobs_in_doubt  # here: work queues are built on all of this

    missing, doubtful, totals = jobs_in_doubt(records.items, records.queue_id, records.marks, records.path)
    return JobDoubts(missing=missing, doubtful=doubtful), totals
