"""Planted faults of the inbox: mutations of the library, one switch each, as in ``planted.py``. With each stands which
rule of docs/format.md it breaks, and what the explorer says is broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

from kestrelpy._journal import checkpoint
from kestrelpy._journal.journal import Journal
from kestrelpy._reading.local_source import LocalSource
from kestrelpy.inbox import parts as parts_module
from kestrelpy.inbox import publishing
from kestrelpy.inbox.format import LedgerState
from kestrelpy.inbox.host import InboxHost
from kestrelpy.inbox.ingest import Ingest
from kestrelpy.inbox.ledger import IngestLedger
from kestrelpy.inbox.parts import PartWriter
from kestrelpy.inbox.publishing import _OwnerlessHost
from tests.crash.inbox_world import Habit
from tests.crash.planted import _Deaf, in_place_of

TAKING = Habit(steps=5, publishes=6, again=0, parts=0, puts=0, takes=0, opens=4, deaths=0, sizes=(2500,), sync="never")
FAILING = Habit(steps=12, publishes=6, again=0, parts=0, puts=6, takes=6, opens=1, deaths=1, sizes=(900, 2500))


class InboxFault(NamedTuple):
    """A mutation. ``invariants``: one of these is what the explorer says is broken."""

    plant: Callable[[], AbstractContextManager[None]]
    invariants: str
    options: dict[str, Any]


FAULTS: dict[str, InboxFault] = {}


def fault(invariants: str, **options: Any) -> Callable[[Callable[[], Iterator[None]]], None]:
    def note(function: Callable[[], Iterator[None]]) -> None:
        FAULTS[function.__name__] = InboxFault(contextmanager(function), invariants, {"failing": 0.0, **options})

    return note


@contextmanager
def _deaf_while(owner: type, method: str, folder: str = "_folder") -> Iterator[None]:
    """While this method runs, syncs of the inbox's files and names do nothing."""
    real = getattr(owner, method)

    def run(self: Any, *rest: Any) -> Any:
        inner = getattr(self, folder)
        setattr(self, folder, _DeafFolder(inner))
        try:
            return real(self, *rest)
        finally:
            setattr(self, folder, inner)

    with patch.object(owner, method, run):
        yield


class _DeafFolder(_Deaf):
    """A folder whose syncs do nothing, and those of its files."""

    def create(self, name: str) -> Any:
        return _Deaf(self._inner.create(name))

    def open(self, name: str, **how: Any) -> Any:
        return _Deaf(self._inner.open(name, **how))


@fault("(a) (b)")
def intent_not_on_disk() -> Iterator[None]:
    with _deaf_while(IngestLedger, "begin"):
        yield


@fault("(a) (b)")
def no_intent() -> Iterator[None]:
    with patch.object(IngestLedger, "begin", lambda self, intent: None):
        yield


@fault("(b)", seed=6, nested=0.8)
def intent_of_a_dead_owner_believed() -> Iterator[None]:
    """It may be in the page cache alone."""
    real = IngestLedger.begin

    def begin(self: IngestLedger, intent: Any) -> None:
        if self.state.intent != intent:
            real(self, intent)

    with patch.object(IngestLedger, "begin", begin):
        yield


@fault("(a) (b)")
def done_before_its_items_are_on_disk() -> Iterator[None]:
    with (
        patch.object(InboxHost, "sync_locked", lambda self: self._source.show_durable_locked(self.journal.tail_id, 0)),
        patch.object(_OwnerlessHost, "sync_locked", lambda self: None),
    ):
        yield


@fault("(a) (b) (g)")
def done_not_on_disk() -> Iterator[None]:
    """And then the files go."""
    with _deaf_while(IngestLedger, "finish"):
        yield


@fault("(a) (b) (f)")
def files_deleted_before_it_is_done() -> Iterator[None]:
    real = Ingest._append_rest

    def append(self: Ingest, batch: Any, there: int) -> None:
        real(self, batch, there)
        self._clear(batch)

    with patch.object(Ingest, "_append_rest", append):
        yield


@fault("(b)")
def not_asked_whether_it_is_known() -> Iterator[None]:
    with patch.object(LedgerState, "knows", lambda self, batch: False):
        yield


@fault("(b)")
def known_by_its_version_alone() -> Iterator[None]:
    """What has no app_id comes back when a power cut undoes its deletion."""

    def note_done(self: LedgerState, batch_id: bytes, number: int, app_id: str, version: int) -> None:
        self.note_version(app_id, version)
        self.intent = None

    with patch.object(LedgerState, "note_done", note_done):
        yield


@fault("(b)")
def gone_on_with_from_its_first_item() -> Iterator[None]:
    with patch.object(Ingest, "_count_there", lambda self, intent: 0):
        yield


@fault("(a) (b)", nested=0.9, samples=0, style=TAKING)
def counted_by_ids() -> Iterator[None]:
    """A power cut leaves ids behind that no item has."""
    with patch.object(Ingest, "_count_there", lambda self, intent: self._host.journal.tail_id + 1 - intent.first_id):
        yield


@fault("(a) (f)", exhaust=120)
def names_not_on_disk_before_the_intent() -> Iterator[None]:
    """Of a batch whose publisher was killed before it could see to that."""
    real = Ingest._begin

    def begin(self: Ingest, batch: Any) -> bool:
        folder = self._folder
        self._folder = _Deaf(folder)
        try:
            return real(self, batch)
        finally:
            self._folder = folder

    with patch.object(Ingest, "_begin", begin):
        yield


@fault("(a) (f)")
def part_not_synced() -> Iterator[None]:
    real = PartWriter.seal

    def seal(self: PartWriter) -> Any:
        if self._file is None:
            self._encoder.flush()
        if self._file is not None:
            self._file = _Deaf(self._file)
        return real(self)

    with patch.object(PartWriter, "seal", seal):
        yield


@fault("(a) (f)")
def published_without_a_sync() -> Iterator[None]:
    real = publishing.replace_file
    with patch.object(publishing, "replace_file", lambda folder, *rest: real(_DeafFolder(folder), *rest)):
        yield


@fault("(a)")
def said_to_be_published_on_a_dead_ones_word() -> Iterator[None]:
    """Who published it was killed before its name was on disk."""
    real_publishing = publishing._publishing

    def deaf_publishing(*arguments: Any) -> Any:
        @contextmanager
        def deaf() -> Iterator[Any]:
            with real_publishing(*arguments) as folder:
                yield _Deaf(folder)

        return deaf()

    with patch.object(publishing, "_publishing", deaf_publishing):
        yield


@fault("(b) (g)")
def published_without_a_look_at_what_is_pending() -> Iterator[None]:
    with (
        patch.object(publishing, "_published", lambda *_: []),
        patch.object(LedgerState, "knows", lambda self, batch: batch.batch_id in self.finished),
    ):
        yield


@fault("(b) (g)")
def published_without_a_look_at_what_is_remembered() -> Iterator[None]:
    def last(folder: Any, queue: str, app_id: str, there: Any) -> int | None:
        found = [batch.version for batch in there if batch.app_id == app_id]
        return max(found, default=None)

    with patch.object(publishing, "_last_version", last):
        yield


@fault("(a) (f)")
def replaced_without_a_sync() -> Iterator[None]:
    real = checkpoint.write_temporary
    with in_place_of(real, lambda folder, *rest: real(_DeafFolder(folder), *rest)):
        yield


@fault("(h)", seed=150, failing=1.0, style=FAILING, samples=0, nested=0.0, points=2)
def shown_before_it_is_whole() -> Iterator[None]:
    with patch.object(LocalSource, "hide_from_locked", lambda self, first_id: None):
        yield


@fault("(b) (c) (h)", seed=32, failing=1.0)
def puts_in_the_middle_of_a_batch() -> Iterator[None]:
    with (
        patch.object(InboxHost, "refuse_locked", lambda self, error: None),
        patch.object(InboxHost, "finish", lambda self: None),
    ):
        yield


@fault("(b) (c)", failing=1.0, style=replace(FAILING, kinds=frozenset({"sync"}), within=6), samples=0, nested=0.0)
def an_intent_that_may_be_on_disk_is_let_be() -> Iterator[None]:
    """Its sync has failed, and what is put then is taken for its items."""

    def never(self: IngestLedger, to: bool) -> None:
        """The fault."""

    with patch.object(IngestLedger, "is_unsure", property(lambda self: False, never), create=True):
        yield


@fault("(c) (f)")
def a_frame_lost_when_it_is_cut() -> Iterator[None]:
    real = parts_module.cut_body

    def cut(kind: int, data: bytes, lengths: Any, skip: int, most: int) -> Any:
        yield from list(real(kind, data, lengths, skip, most))[: 1 if len(lengths) > 3 else None]

    with patch.object(parts_module, "cut_body", cut):
        yield


@fault("(a) (b) (c) (f)")
def an_item_appended_backwards() -> Iterator[None]:
    real = Journal.append_body

    def append(self: Journal, body: Any, added_ms: int) -> None:
        real(self, body._replace(data=body.data[::-1]) if not body.kind else body, added_ms)

    with patch.object(Journal, "append_body", append):
        yield
