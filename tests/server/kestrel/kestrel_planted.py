"""Planted faults of the kestrel server's queues: mutations of the library, one switch each. With each stands what the
crash explorer says is broken, and what its programs should lean to so that it is caught soon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from kestrelpy._reading.checkpointer import Checkpointer
from kestrelpy.server.kestrel import ack_log, queues
from kestrelpy.server.kestrel.ack_log import AckLog
from kestrelpy.server.kestrel.acknowledgements import Acknowledgements
from kestrelpy.server.kestrel.journal import SharedJournal
from kestrelpy.server.kestrel.queue import ServedQueue
from kestrelpy.server.kestrel.storage import Storage

DELETING = {"delete": 6.0, "mention": 3.0}


class KestrelFault(NamedTuple):
    """A mutation. ``letters``: one of these is what is said to be broken."""

    plant: Callable[[], AbstractContextManager[None]]
    letters: str
    options: dict[str, Any]


FAULTS: dict[str, KestrelFault] = {}


def fault(letters: str, **options: Any) -> Callable[[Callable[[], Iterator[None]]], None]:
    def note(function: Callable[[], Iterator[None]]) -> None:
        FAULTS[function.__name__] = KestrelFault(contextmanager(function), letters, options)

    return note


@fault("(b)")
def acknowledgements_are_not_written() -> Iterator[None]:
    """They wait for the next checkpoint."""
    with patch.object(AckLog, "append", lambda self, acks: 0):
        yield


@fault("(b)", sync=0)
def acknowledgements_are_not_synced() -> Iterator[None]:
    with patch.object(AckLog, "sync", lambda self: None):
        yield


@fault("(a)", sync=0)
def journals_are_not_synced() -> Iterator[None]:
    with patch.object(Storage, "note_written", lambda self, journal: None):
        yield


@fault("(b)")
def plain_gets_are_not_noted() -> Iterator[None]:
    """They are committed, and that is all."""
    with patch.object(ServedQueue, "note_done", lambda self, item: None):
        yield


@fault("(b)")
def confirms_are_not_noted() -> Iterator[None]:
    def confirm(self: ServedQueue, read: Any) -> None:
        self.forget(read)
        read.item.commit()

    with patch.object(ServedQueue, "confirm", confirm):
        yield


@fault("(c)", steps={"delete": 0.0, "flush": 0.0, "get": 0.0, "open": 0.0})
def fanouts_have_a_record_each() -> Iterator[None]:
    """KS-B12, in part: the fan-outs get their items one after another."""

    def add(self: SharedJournal, data: bytes, expires_at_ms: int | None) -> bool:
        children = list(self.children.values())
        if not children:
            return real(self, data, expires_at_ms)
        taken = [self.add_to_child(child, data, expires_at_ms) for child in children]
        return all(taken)

    real = SharedJournal.add
    with patch.object(SharedJournal, "add", add):
        yield


@fault("(a) (b) (c)", steps={"mention": 6.0}, sync=0)
def a_new_fanout_is_not_durable() -> Iterator[None]:
    real = Checkpointer.save_alone
    with patch.object(Checkpointer, "save_alone", lambda self, durable, **rest: real(self, False, **rest)):
        yield


@fault("(a) (b)", steps={"delete": 5.0, "get": 12.0, "mention": 0.0, "open": 0.0, "save": 0.0, "advance": 0.0})
def deletions_are_not_noted() -> Iterator[None]:
    """What was acknowledged before is applied to what has the same name and the same ids later."""
    with patch.object(AckLog, "note_drop", lambda self, queue, reader: None):
        yield


@fault("(a) (b)", steps=DELETING)
def what_is_made_again_is_not_noted() -> Iterator[None]:
    """So it is deleted at the start, as if the deletion before had not been finished."""
    with patch.object(AckLog, "note_make", lambda self, queue, reader: None):
        yield


@fault("(b)", steps=DELETING)
def deletions_are_not_finished() -> Iterator[None]:
    with patch.object(Storage, "finish_deletions", lambda self, dropped: None):
        yield


@fault("(b)", steps={"save": 8.0})
def the_log_is_cut_before_the_checkpoints() -> Iterator[None]:
    with patch.object(Acknowledgements, "_save_all", lambda self, queues, record: self._log.drop_through(record)):
        yield


@fault("(a) (b)")
def spans_are_one_too_long() -> Iterator[None]:
    real = ack_log._spans

    def spans(ids: list[int]) -> Iterator[str]:
        return (f"{span}-{int(span) + 1}" if "-" not in span else span for span in real(ids))

    with patch.object(ack_log, "_spans", spans):
        yield


@fault("(a) (c) (e)", steps={"mention": 8.0})
def the_reader_that_was_renamed_is_opened_twice() -> Iterator[None]:
    with patch.object(queues, "OWN_READER", "no reader has this name"):
        yield


@fault("(b)", steps={"flush": 6.0}, sync=0)
def a_flush_is_not_durable() -> Iterator[None]:
    def flush(self: ServedQueue) -> None:
        for reader in self.readers():
            reader.flush()

    with patch.object(ServedQueue, "flush", flush):
        yield
