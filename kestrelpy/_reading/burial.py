"""``Burial``: moves items of one reader to another queue, exactly once: dead ones, and dead letters that go back.

Rules (docs/dead-letters.md):
1. First the intent is on disk, in the reader's checkpoint: which items, to which queue, as which move. Then they are
   published there, under the number of that move. Then they are done here. The checkpoint that has them as done has no
   intent any more. So a crash at any place leaves an intent that can be carried out again, or none that is needed.
2. There is one intent at a time. It stays until it is known that its batch is published, or that it is not: a number
   is never used for two moves. Items that die meanwhile go with the next one.
3. Until they are done, the items are in the backlog's ``with_hook``: nobody gets them, and no segment that has them is
   retired. The next owner of the reader holds them back in the same way, and carries out the intent first.
4. A move that fails is tried again, by the timer of ``RETRY_SECONDS`` and by the next opening.
5. What is too large for the other queue keeps nothing back. A dead item is set aside, in ``with_hook``, until the limit
   there is raised; a move without it takes the others. A letter that was to go back is unread again.

NOTE ON LOCKING: ``moving`` (B in docs/locking.md) is held during a move. It comes before the locks of a checkpoint (C,
G) and the backlog's (R). A thread that aborts does not wait for it: who has it moves what others have added. The
backlog's lock guards ``waiting``, and the intent, which is ``progress.move``; only a thread with ``moving`` takes an
intent away.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from kestrelpy import _logging
from kestrelpy._journal.moves import Move, MoveNote
from kestrelpy._logging import Trouble
from kestrelpy._reading.backlog import BLOCK_BYTES
from kestrelpy._reading.dispatch import Dispatcher
from kestrelpy._waiting.line import taken_now
from kestrelpy.errors import ItemTooLarge, KestrelError, UnknownItem, UnsupportedFormat, WrongKind
from kestrelpy.item import Item
from kestrelpy.letter import DeadLetter, decode_letter, encode_letter

if TYPE_CHECKING:
    from kestrelpy.config import ReaderConfig

RETRY_SECONDS = 1.0
MOST_NOTES = 100
"""One move has at most so many items."""
NOTHING_PUBLISHED = (ItemTooLarge, WrongKind, UnsupportedFormat)
"""After one of these, it is known that a batch is not published."""


class Dead(NamedTuple):
    """An item that waits for the next move."""

    item: Item
    note: MoveNote
    target: str
    is_requeue: bool


def check_dead_letter(config: ReaderConfig, queue: str, *, journaled: bool = True) -> None:
    """Raise ``ValueError`` (``InvalidName``) if a reader of ``queue`` can't have this ``dead_letter``."""
    if config.dead_letter is None:
        return
    from kestrelpy._journal.file_names import check_name

    check_name(config.dead_letter)
    if config.dead_letter == queue:
        raise ValueError(f"dead_letter={queue!r} is the queue itself: its dead letters need another queue")
    if not journaled:
        raise ValueError(f"dead_letter={config.dead_letter!r} needs a folder: a queue in memory has none")


def _among(dead: dict[int, Dead], ids: Container[int]) -> dict[int, Dead]:
    return {item_id: each for item_id, each in dead.items() if item_id in ids}


def _not_among(dead: dict[int, Dead], ids: Container[int]) -> dict[int, Dead]:
    return {item_id: each for item_id, each in dead.items() if item_id not in ids}


def _too_large(dead: dict[int, Dead], most: dict[str, int]) -> dict[int, Dead]:
    """Those that are larger than the queues that they are to go to take."""
    is_too_large = _publisher().too_large
    return {item_id: each for item_id, each in dead.items() if is_too_large(each.item.data, most[each.target])}


def _content(move: Move, item: Item) -> bytes:
    """What counts of a moved item, in the queue that it goes to."""
    letter = decode_letter(item.data) if move.is_requeue else None
    return item.data if letter is None else letter.data


def _publisher() -> ModuleType:
    from kestrelpy.inbox import moves  # when a first item dies: most programs have no dead letters

    return moves


class Burial:
    """The moves of one reader. ``save``: saves its checkpoint, durably."""

    def __init__(self, dispatcher: Dispatcher, save: Callable[[bool], None]) -> None:
        self._dispatcher = dispatcher
        self._backlog = dispatcher.backlog
        self._source = dispatcher.source
        self._save = save
        self.moving = threading.Lock()
        self.waiting: dict[int, Dead] = {}  # guarded by the backlog's lock
        self._noted: Move | None = None  # guarded by moving: the intent that is known to be on disk
        self._passed: dict[int, Move] = {}  # guarded by the backlog's lock: items that this move does not move any more
        self._pauses: set[object] = set()  # seeks under way: no intent is made
        self._stream = b""
        self._number = 0
        self._is_resting = False  # a move failed: the timer tries it again
        self._aside: dict[int, Dead] = {}  # guarded by the backlog's lock, never changed: too large for their target
        self._is_due = False  # these are to be looked at again
        self._is_armed = False  # the timer is under way
        self._trouble = Trouble()
        self.dead = self.failures = 0
        if self._backlog.progress.move is not None:
            self._hold_back(self._backlog.progress.move)

    def _hold_back(self, move: Move) -> None:
        """At an opening with an intent: take its items out of what is unread. An item that can't be read stays there:
        a get says why. One that is done was skipped.
        """
        backlog = self._backlog
        with backlog.lock:
            for note in move.notes:
                self._take_out_locked(note.item_id, move)
            backlog.disturbed = True
            backlog.repair()

    def _take_out_locked(self, item_id: int, move: Move) -> None:
        backlog = self._backlog
        self._passed[item_id] = move
        if not backlog.progress.is_done(item_id):
            with suppress(KestrelError, OSError):
                entry = self._source.read(item_id, item_id, BLOCK_BYTES, None).entries.get(item_id)
                if entry is not None:
                    backlog.with_hook[item_id] = backlog.make_item(item_id, entry)
                    del self._passed[item_id]

    # -- what is to be moved ---------------------------------------------------------------------------------------

    def add_locked(self, item: Item, target: str, reason: str, died_ms: int) -> None:
        """An item is dead, and in ``with_hook``: it goes to the queue ``target`` with the next move."""
        note = MoveNote(item.id, item.error_count, died_ms, reason)
        self.waiting[item.id] = Dead(item, note, target, False)

    def skip_locked(self, item_id: int) -> None:
        """The reader was moved forward to ``item_id``, past its dead items before that: they count as skipped."""
        move = self._backlog.progress.move
        if move is not None:
            passed = {key: of for key, of in self._passed.items() if of is move}
            self._passed = passed | {note.item_id: move for note in move.notes if note.item_id < item_id}

    def take_over(self, item: Item, target: str) -> None:
        """Move the data of a dead letter, an open read, to the queue ``target``. On disk when this returns. Raises
        ``UnknownItem``, ``KestrelError`` and ``OSError``; after one of ``NOTHING_PUBLISHED`` the read is open again.
        """
        backlog = self._backlog
        with self.moving:
            self._finish_before()
            with backlog.lock:
                backlog.check_usable()
                if self._pauses or backlog.opened.get(item.id) is not item:  # the seek drops all open reads
                    raise UnknownItem(item.id, backlog.full_name)
                dead = Dead(item, MoveNote(item.id), target, True)
                made = self._made([dead])
                # No call from here on: an interrupt strikes before or after all of these stores.
                backlog.with_hook[item.id] = item
                del backlog.opened[item.id]
                backlog.progress.move = made
                self._number = made.number
            try:
                self._carry_out(made)
            except NOTHING_PUBLISHED:
                with backlog.lock:
                    backlog.opened[item.id] = item
                    backlog.with_hook.pop(item.id, None)
                    backlog.progress.move = None
                raise
            except (KestrelError, OSError) as error:
                self._rest(error)
                raise
            except BaseException:
                self._rest(None)
                raise
        self._dispatcher.notify()

    def _finish_before(self) -> None:
        """Carry out an intent that is there. Raises as ``_finish``."""
        move = self._backlog.progress.move
        if move is not None:
            self._finish(move)

    def note_locked(self) -> Move | None:
        """The intent. If there is none, and items wait, it is made of them. From the next checkpoint on it counts."""
        progress, waiting = self._backlog.progress, self.waiting
        if progress.move is not None or not waiting or self._pauses:
            return progress.move
        with_hook, is_over = self._backlog.with_hook, self._backlog.broken is not None  # then that is empty
        there = [dead for dead in waiting.values() if is_over or with_hook.get(dead.item.id) is dead.item]
        chosen = [dead for dead in there if dead.target == there[0].target][:MOST_NOTES]
        made = self._made(chosen) if chosen else None
        gone = {dead.item.id for dead in chosen}
        rest = {dead.item.id: dead for dead in there if dead.item.id not in gone}
        # No call from here on: an interrupt strikes before or after all of these stores.
        self.waiting = rest
        if made is not None:
            progress.move, self._number = made, made.number
        return made

    def _made(self, chosen: list[Dead]) -> Move:
        if not self._stream:
            self._stream = _publisher().new_stream()
        notes = tuple(sorted(dead.note for dead in chosen))
        return Move(self._stream, self._number + 1, chosen[0].target, chosen[0].is_requeue, notes)

    # -- moving ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Move what is dead, unless another thread does, or a move has just failed. Raises nothing for a move that
        fails: it is counted, logged once and tried again.
        """
        while True:
            if self._is_resting or not (self.waiting or self._is_due or self._backlog.progress.move is not None):
                return
            held = went = False
            try:
                for held in taken_now(self.moving.acquire):  # one step
                    went = held and self._move_once()
            finally:
                if held:
                    self.moving.release()
            if not went:
                return
            self._dispatcher.notify()
            self._dispatcher.hand_off()

    def _move_once(self) -> bool:
        """Carry out the intent, or the next one. Returns whether there was one and it went well."""
        backlog = self._backlog
        try:
            if self._is_due:
                self._look_at_large()
            with backlog.lock:
                move = None if backlog.broken is not None else self.note_locked()
            if move is None:
                return False
            self._finish(move)
        except (KestrelError, OSError) as error:
            self._rest(error)
            return False
        except BaseException:  # an interrupt: another thread has to do it
            self._rest(None)
            raise
        self._trouble.end(self._what(move))
        return True

    def _finish(self, move: Move) -> None:
        """Carry out an intent, after which there is none. Raises as ``_carry_out``, but ``ItemTooLarge``."""
        try:
            self._carry_out(move)
        except ItemTooLarge as error:
            self._give_back(move, error)

    def _carry_out(self, move: Move) -> None:
        """The three steps of rule 1, each of which may have been done before. Raises ``ItemTooLarge`` for a letter that
        can't go back: then nothing is published.
        """
        if self._noted is not move:
            self._save(True)
            self._noted = move
        backlog, source, publisher = self._backlog, self._source, _publisher()
        with backlog.lock:
            backlog.check_usable()  # closed: the checkpoint has the intent, and the next owner carries it out
            found = [(note, backlog.with_hook.get(note.item_id)) for note in move.notes]
        items = [(note, item) for note, item in found if item is not None]  # one that can't be read stays unread here
        folder, disk = self._folder(), source.disk
        most = publisher.largest_of(folder, move.target, disk=disk)
        sizes = {item.id: publisher.too_large(_content(move, item), most) for _, item in items}
        large = {item_id: size for item_id, size in sizes.items() if size}
        if large and not publisher.was_published(folder, move, disk=disk):
            self._set_aside(move, large, most)
            return
        data = [self._published(move, note, item) for note, item in items]
        publisher.publish_move(folder, move, data, disk=disk, clock=source.clock)
        self._settle(move)

    def _published(self, move: Move, note: MoveNote, item: Item) -> bytes:
        """An item as it is published."""
        if move.is_requeue:
            return _content(move, item)
        queue, reader = self._source.name, self._backlog.name
        about = (queue, reader, item.id, item.added_ms, note.died_ms, note.error_count, note.reason)
        return encode_letter(DeadLetter(item.data, *about))

    def _folder(self) -> str:
        """The path of the folder, by which the other queue is found. Raises ``FileNotFoundError`` if the folder of this
        queue is not there any more.
        """
        directory = self._source.directory
        directory.check_place()
        return directory.path

    def _settle(self, move: Move) -> None:
        """The move is published: its items are done."""
        backlog = self._backlog
        try:
            with backlog.lock:
                for note in move.notes:
                    self._let_go_locked(note.item_id)
                dead = self.dead + (0 if move.is_requeue else self._count_not_passed(move))
                # No call from here on.
                self.dead = dead
                backlog.progress.move = None
        except BaseException as error:
            self._dispatcher.recover(error)
            raise

    def _let_go_locked(self, item_id: int) -> None:
        backlog = self._backlog
        item = backlog.with_hook.get(item_id)
        if item is not None:
            if not backlog.progress.is_done(item_id):
                backlog.release(item_id, item.data)
            del backlog.with_hook[item_id]

    def _count_not_passed(self, move: Move) -> int:
        """How many items of the move died here: the others were passed by a skip."""
        return len([note for note in move.notes if self._passed.get(note.item_id) is not move])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For a ``seek``: nothing is moved, and there is no intent. Raises as ``_withdraw``. ``moving`` is not held: a
        seek waits for the guard of the queue's readers, which another process may have for long.
        """
        token = object()
        try:
            with self.moving:
                self._withdraw()
                self._pauses.add(token)
            yield
            backlog = self._backlog
            with backlog.lock:  # the seek has dropped them
                self.waiting, self._aside = _among(self.waiting, backlog.with_hook), self._large_there()
        finally:
            self._pauses.discard(token)

    def _withdraw(self) -> None:
        """Know what became of the intent, and end it. If it is published, its items are done. If not, they wait for
        the next move, unless the seek drops them. Raises ``OSError``.
        """
        backlog = self._backlog
        move = backlog.progress.move
        if move is None:
            return
        if _publisher().was_published(self._folder(), move, disk=self._source.disk):
            self._settle(move)
            return
        with backlog.lock:
            back = self._dead_of(move) | self.waiting
            # No call from here on.
            self.waiting = back
            backlog.progress.move = None

    def _dead_of(self, move: Move) -> dict[int, Dead]:
        """What there is of an intent that is taken back."""
        found = [(note, self._backlog.with_hook.get(note.item_id)) for note in move.notes]
        target, back = move.target, move.is_requeue
        return {note.item_id: Dead(item, note, target, back) for note, item in found if item is not None}

    # -- too large ---------------------------------------------------------------------------------------------------

    def _set_aside(self, move: Move, large: dict[int, int], most: int) -> None:
        """Items of a move that is not published are too large for the other queue: the others go with the next move.

        ``large``: their sizes. Raises ``ItemTooLarge`` if it is a letter, which can't go back.
        """
        if move.is_requeue:
            raise ItemTooLarge(max(large.values()), most)
        backlog = self._backlog
        with backlog.lock:
            dead = self._dead_of(move)
            aside, rest = self._aside | _among(dead, large), _not_among(dead, large) | self.waiting
            failures = self.failures + len(large)
            # No call from here on.
            self.waiting, self._aside, self.failures = rest, aside, failures
            backlog.progress.move = None
        shown = ", ".join(f"{item_id} ({size:,} bytes)" for item_id, size in large.items())
        text = "reader %s: dead items are too large for queue %s (max_item_bytes=%d), and stay here, undelivered: %s"
        _logging.warning(text, backlog.full_name, move.target, most, shown)
        self._arm()

    def _look_at_large(self) -> None:
        """Those that are not too large any more go with the next move. Raises ``OSError``."""
        publisher, source, backlog = _publisher(), self._source, self._backlog
        folder = self._folder()
        targets = {dead.target for dead in self._aside.values()}
        most = {each: publisher.largest_of(folder, each, disk=source.disk) for each in targets}
        with backlog.lock:
            there = self._large_there()
            aside = _too_large(there, most)
            waiting = _not_among(there, aside) | self.waiting
            # No call from here on.
            self.waiting, self._aside = waiting, aside
            self._is_due = False
        if aside:
            self._arm()

    def _large_there(self) -> dict[int, Dead]:
        with_hook = self._backlog.with_hook
        return {item_id: dead for item_id, dead in self._aside.items() if with_hook.get(item_id) is dead.item}

    @property
    def too_large(self) -> int:
        """How many dead items stay here, as they are too large for the queue of the dead letters."""
        return len(self._large_there())

    def _give_back(self, move: Move, error: ItemTooLarge) -> None:
        """A letter can't go back, as its queue takes less than before: it is unread again."""
        backlog = self._backlog
        try:
            with backlog.lock:
                for item_id in (note.item_id for note in move.notes):
                    self._make_unread_locked(item_id)
                backlog.progress.move = None
        except BaseException as struck:
            self._dispatcher.recover(struck)
            raise
        text = "dead letter %d of %s can't go back to queue %s, and stays: %s"
        _logging.warning(text, move.notes[0].item_id, backlog.full_name, move.target, error)

    def _make_unread_locked(self, item_id: int) -> None:
        item = self._backlog.with_hook.pop(item_id, None)
        if item is not None:
            self._backlog.requeue(item_id, (item.data, item.added_ms, item.expires_ms))

    # -- trying again ----------------------------------------------------------------------------------------------

    def _what(self, move: Move) -> str:
        return f"moving items of {self._backlog.full_name} to {move.target}"

    def _rest(self, error: Exception | None) -> None:
        """A move has failed, or was interrupted: have the timer try it again."""
        move = self._backlog.progress.move
        if error is not None and move is not None and self._backlog.broken is None:
            if not move.is_requeue:
                self.failures += 1
            self._trouble.begin(self._what(move), error)
        self._is_resting = True
        self._arm()

    def _arm(self) -> None:
        """Have the timer try it again, once."""
        if self._is_armed:
            return
        mine = weakref.ref(self)

        def again(_lost: object = None) -> None:
            burial = mine()
            if burial is not None:
                burial._start()

        try:
            self._is_armed = True
            self._source.clock.call_later(RETRY_SECONDS, again, on_lost=again)
        except BaseException as struck:
            self._is_armed = self._is_resting = False  # the next abort tries it again
            if not isinstance(struck, RuntimeError):
                raise

    def _start(self) -> None:
        """Try again, on a thread of its own: a move waits for syncs, and for a process that publishes."""
        self._wake()
        if self._backlog.broken is None:
            with suppress(RuntimeError):  # no thread can be started: the next abort tries it again
                threading.Thread(target=self.run, name="kestrelpy-dead-letters", daemon=True).start()

    def _wake(self) -> None:
        self._is_armed = self._is_resting = False
        self._is_due = bool(self._aside)

    def abandon(self) -> None:
        """In a forked child: a thread of the parent may have held the lock."""
        self.moving = threading.Lock()
