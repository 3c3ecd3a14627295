"""Planted faults of moves: mutations of the library, one switch each, as in ``planted.py``. With each stands which rule
of ``kestrelpy._reading.burial`` it breaks, and what the explorer says is broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple
from unittest.mock import patch

from kestrelpy._journal.checkpoint import CheckpointFile
from kestrelpy._journal.moves import Move
from kestrelpy._reading.burial import Burial
from kestrelpy._reading.progress import Progress
from kestrelpy.inbox import moves
from tests.crash.dead_world import Habits

MOVING = Habits(fails=8, commits=0, requeues=0, drops=0, seeks=0, renames=0)
BACK = Habits(fails=8, commits=0, requeues=8, drops=0, seeks=0, renames=0, owners=0)
REOPENED = Habits(fails=8, commits=0, requeues=0, drops=0, seeks=0, opens=8)


class DeadFault(NamedTuple):
    """A mutation. ``invariants``: one of these is what the explorer says is broken."""

    plant: Callable[[], AbstractContextManager[None]]
    invariants: str
    options: dict[str, Any]


FAULTS: dict[str, DeadFault] = {}


def fault(invariants: str, **options: Any) -> Callable[[Callable[[], Iterator[None]]], None]:
    def note(function: Callable[[], Iterator[None]]) -> None:
        FAULTS[function.__name__] = DeadFault(contextmanager(function), invariants, {"failing": 0.0, **options})

    return note


def _done_first(self: Burial, move: Move) -> None:
    """As ``Burial._carry_out``, with the items done before they are published."""
    with self._backlog.lock:
        found = [(note, self._backlog.with_hook.get(note.item_id)) for note in move.notes]
    data = [self._published(move, note, item) for note, item in found if item is not None]
    self._settle(move)
    self._save(True)
    source = self._source
    assert source.disk is not None
    moves.publish_move(source.directory.path, move, data, disk=source.disk, clock=source.clock)


@fault("(a)", habits=MOVING)
def commit_before_publish() -> Iterator[None]:
    """Rule 1."""
    with patch.object(Burial, "_carry_out", _done_first):
        yield


@fault("(a)", habits=BACK)
def requeue_commits_first() -> Iterator[None]:
    """Rule 1, the other way round."""
    real = Burial._carry_out

    def carry_out(self: Burial, move: Move) -> None:
        (_done_first if move.is_requeue else real)(self, move)

    with patch.object(Burial, "_carry_out", carry_out):
        yield


@fault("(b)", habits=MOVING)
def intent_not_durable() -> Iterator[None]:
    """Rule 1: it may be in the page cache alone."""
    real = Burial._carry_out

    def carry_out(self: Burial, move: Move) -> None:
        save, self._save = self._save, lambda durable: save(False)
        try:
            real(self, move)
        finally:
            self._save = save

    with patch.object(Burial, "_carry_out", carry_out), _files_of_one_version():
        yield


@contextmanager
def _files_of_one_version() -> Iterator[None]:
    """A state with a move is appended like any other: a replaced file would be durable."""
    real = CheckpointFile.save

    def save(self: CheckpointFile, state: Any, *, durable: bool) -> None:
        self._has_moves = state.move is not None
        real(self, state, durable=durable)

    with patch.object(CheckpointFile, "save", save):
        yield


@fault("(b)", habits=MOVING)
def no_intent() -> Iterator[None]:
    real = Burial._carry_out

    def carry_out(self: Burial, move: Move) -> None:
        self._noted = move
        real(self, move)

    with patch.object(Burial, "_carry_out", carry_out):
        yield


@fault("(b)", habits=MOVING)
def intent_forgotten_at_the_opening() -> Iterator[None]:
    """Rule 3: the file has it."""
    real = Progress.load

    def load(state: Any) -> Progress:
        return real(state._replace(move=None))

    with patch.object(Progress, "load", load):
        yield


@fault("(a) (d)", habits=MOVING)
def version_reused() -> Iterator[None]:
    """Rule 2: the second move of a stream is taken for the first."""
    real = Burial._made

    def made(self: Burial, chosen: Any) -> Move:
        return real(self, chosen)._replace(number=1)

    with patch.object(Burial, "_made", made):
        yield


@fault("(a)", habits=REOPENED)
def stream_goes_on_after_an_opening() -> Iterator[None]:
    """Rule 2: numbers begin again, and the other queue knows them."""
    with patch.object(moves, "new_stream", lambda: b"the only stream."):
        yield


@fault("(b)", habits=MOVING)
def published_again_as_another_move() -> Iterator[None]:
    """Rule 2: each try has its own number."""
    real = Burial._carry_out

    def carry_out(self: Burial, move: Move) -> None:
        real(self, move._replace(stream=moves.new_stream()))

    with patch.object(Burial, "_carry_out", carry_out):
        yield


@fault("(b) (f)", habits=REOPENED, failing=1.0)
def items_of_an_intent_not_held_back() -> Iterator[None]:
    """Rule 3: they are delivered, too."""
    real = Burial._hold_back

    def hold_back(self: Burial, move: Move) -> None:
        real(self, move)
        with self._backlog.lock:
            for note in move.notes:
                item = self._backlog.with_hook.get(note.item_id)
                if item is not None:
                    self._backlog.requeued.add(item.id, (item.data, item.added_ms, item.expires_ms))

    with patch.object(Burial, "_hold_back", hold_back):
        yield


@fault("(a)", habits=MOVING, failing=1.0)
def done_although_publishing_failed() -> Iterator[None]:
    """Rule 4."""
    real = moves.publish_move

    def publish_move(*about: Any, **how: Any) -> None:
        with suppress(OSError):
            real(*about, **how)

    with patch.object(moves, "publish_move", publish_move):
        yield


@fault("(e)", habits=BACK)
def letter_goes_back_with_its_head() -> Iterator[None]:
    """The data of a dead letter is that of the item, byte for byte."""
    real = Burial._published

    def published(self: Burial, move: Move, note: Any, item: Any) -> bytes:
        return item.data if move.is_requeue else real(self, move, note, item)

    with patch.object(Burial, "_published", published):
        yield
