"""``Acknowledgements``: what clients are done with, of all queues of a server: noted in each turn, saved now and then.

The log (``ack_log``) has what was acknowledged since the readers' last checkpoints. Every few seconds the checkpoints
of the readers that moved are saved, on another thread, so that the log can forget its records.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kestrelpy import QueueClosed
from kestrelpy.server.kestrel.ack_log import ALL, AckLog

if TYPE_CHECKING:
    from kestrelpy import Clock, JournaledQueue
    from kestrelpy.clock import Timer

__all__ = ["Acknowledgements", "OffLoop"]

SAVE_SECONDS = 5.0
"""How often the readers' checkpoints are saved, so that the log of acknowledgements stays short."""
SAVE_RECORDS = 100_000
"""... and after how many records at the latest."""

OffLoop = Callable[[Callable[[], None], Callable[[BaseException | None], None]], None]
"""Makes the first call on another thread, and then the second on the loop's, with the error of the first, if any."""

_logger = logging.getLogger("kestrelpy.server")


class Acknowledgements:
    """The acknowledgements of one server. All calls are on the thread of the loop."""

    def __init__(self, log: AckLog, clock: Clock, off_loop: OffLoop) -> None:
        self._log = log
        self._clock = clock
        self._off_loop = off_loop
        self._noted: dict[tuple[str, str], list[int]] = {}
        self._must_be_durable = False
        self._unsaved: dict[JournaledQueue, None] = {}
        self._being_saved: dict[JournaledQueue, None] = {}
        self._is_saving = False
        self._timer: Timer | None = None
        self._last_record = self._saved_record = log.last
        self._is_closed = False

    def _check(self) -> None:
        assert self._is_saving or not self._being_saved
        assert self._saved_record <= self._last_record

    # -- a turn --------------------------------------------------------------------------------------------------------

    def note(self, queue: JournaledQueue, reader: str, item_id: int, *, durable: bool) -> None:
        """An item of that reader is done: it must not come again after a kill, once this turn's replies are sent.

        ``durable``: nor after a power cut.
        """
        self._noted.setdefault((queue.name, reader), []).append(item_id)
        self._unsaved[queue] = None
        self._must_be_durable |= durable

    def write(self) -> bool:
        """Write what was noted in this turn. False if there is no room: then call ``save_now``."""
        if not self._noted:
            return True
        noted, self._noted = self._noted, {}
        must_be_durable, self._must_be_durable = self._must_be_durable, False
        try:
            self._last_record = self._log.append(noted)
            if must_be_durable:
                self._log.sync()
        except OSError as error:  # the disk is full, say: the readers' own checkpoints take no room
            _logger.warning("acknowledgements are saved by checkpoints: %s", error)
            return False
        return True

    def save_now(self) -> None:
        """Save the checkpoints of all readers that moved, in place of records. Raises what that raises."""
        for queue in [*self._unsaved, *self._being_saved]:
            _save(queue)
            self._unsaved.pop(queue, None)

    def save_in_time(self) -> None:
        """The end of a turn: begin to save checkpoints, if it is time."""
        if self._last_record == self._saved_record:
            return
        if self._last_record - self._saved_record > SAVE_RECORDS:
            self._save()
        elif self._timer is None and not self._is_closed:
            self._timer = self._clock.call_later(SAVE_SECONDS, self._save)

    def _save(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if self._is_saving or self._is_closed:  # _saved looks again
            return
        self._is_saving = True
        self._being_saved, self._unsaved = self._unsaved, {}
        record = self._last_record
        self._off_loop(partial(self._save_all, list(self._being_saved), record), partial(self._saved, record))

    def _save_all(self, queues: list[JournaledQueue], record: int) -> None:
        """On another thread: save these checkpoints, and forget the records up to ``record``."""
        for queue in queues:
            _save(queue)
        self._log.drop_through(record)

    def _saved(self, record: int, error: BaseException | None) -> None:
        being_saved, self._being_saved = self._being_saved, {}
        self._is_saving = False
        if error is None:
            self._saved_record = max(record, self._saved_record)
            self._log.forget_drops(record)
        else:
            _logger.warning("checkpoints could not be saved, and are saved later: %s", error)
            self._unsaved |= being_saved
        self.save_in_time()

    # -- what is made and deleted --------------------------------------------------------------------------------------

    def note_make(self, queue: str, reader: str) -> None:
        """That reader (``ALL``: the whole queue) is about to be opened or made."""
        self._log.note_make(queue, reader)
        self._last_record = self._log.last

    def note_drop(self, queue: JournaledQueue, reader: str) -> None:
        """That reader (``ALL``: the whole queue) is about to be deleted."""
        _save(queue)  # what the log says of its items is void from here on
        for key in [key for key in self._noted if key[0] == queue.name and reader in (ALL, key[1])]:
            del self._noted[key]
        if reader == ALL:
            self._unsaved.pop(queue, None)
            self._being_saved.pop(queue, None)
        try:
            self._log.note_drop(queue.name, reader)
            self._last_record = self._log.last
        except OSError:  # the disk is full, say: without records, there is nothing to say about them
            self.save_now()
            self._log.drop_through(self._last_record)
            self._saved_record = self._last_record

    # -- the end -------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Begin nothing more."""
        self._is_closed = True
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """The server ends. May be repeated."""
        self._log.close()

    def forget(self) -> None:
        """All queues are closed, and have saved their positions: the records are not needed any more."""
        if self._last_record > self._saved_record and not self._log.closed:
            self._log.drop_through(self._last_record)
            self._saved_record = self._last_record


def _save(queue: JournaledQueue) -> None:
    try:
        queue.checkpoint(durable=True)
    except QueueClosed:  # it was deleted
        return
