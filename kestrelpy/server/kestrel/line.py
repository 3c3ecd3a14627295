"""The consumers that wait in a queue's line: a get, a peek, a monitor, of whatever protocol.

The line is a dictionary in order of arrival, in ``ServedQueue.line``. ``ServedQueue.serve`` gives items to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from kestrelpy import Item
    from kestrelpy.clock import Timer
    from kestrelpy.server._connection import Connection
    from kestrelpy.server.kestrel.queue import ServedQueue

__all__ = ["Consumer", "Get", "Monitor"]


class Refuser(Protocol):
    """The part of the client's ``KestrelProtocol`` that a consumer uses."""

    def refusal(self, client: Any, error: Exception) -> bytes:
        """The reply to a command that has raised this."""

    def ends(self, error: Exception) -> bool:
        """Whether the connection is closed after ``refusal``."""


class Consumer:
    """One client that waits for an item of one queue, for a time. A ``Wait`` of its connection.

    ``found`` makes the reply for an item; ``nothing`` is the reply when no more is waited for.
    """

    peeks = False
    """Whether it only looks at the item."""

    def __init__(
        self, connection: Connection, queue: ServedQueue, found: Callable[[Item], bytes], nothing: bytes
    ) -> None:
        self.connection = connection
        self.queue = queue
        self.found = found
        self.nothing = nothing
        self._timer: Timer | None = None

    def enter(self, seconds: float) -> None:
        """Enter the line, and let the client wait."""
        self.queue.enter(self)
        self._timer = self.queue.queues.clock.call_later(seconds, self.run_out)
        self.connection.wait_for(self)

    def leave(self) -> None:
        """Leave the line. May be repeated."""
        self.queue.leave(self)
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    @property
    def is_in_line(self) -> bool:
        """Whether it waits."""
        return self in self.queue.line

    def last_reply(self) -> bytes:
        """What is said when no more is waited for."""
        return self.nothing

    def is_ready(self) -> bool:
        """Whether an item may be given to it now."""
        return self.connection.is_open and not self.connection.is_finished

    def take(self, item: Item) -> None:
        """This item is for this consumer: it leaves the line, or goes to the end of it."""
        raise NotImplementedError

    def run_out(self) -> None:
        """The time is over: the client waits no longer."""
        self.queue.queues.count_miss()
        self.dismiss()

    def end(self) -> None:
        """There will be no more: the queue is deleted, or the server ends."""
        self.run_out()

    def dismiss(self) -> None:
        """Answer that no more is waited for."""
        self.leave()
        self.connection.answer(self, self.last_reply())

    def fail(self, error: Exception) -> None:
        """The next item can't be read."""
        self.leave()
        connection = self.connection
        protocol = cast("Refuser", connection.protocol)
        connection.answer(self, protocol.refusal(connection.client, error))
        if protocol.ends(error):
            connection.finish()

    def hang_up(self) -> bytes | None:
        """The client sends no more: it gets its ``nothing``."""
        self.queue.queues.count_miss()
        self.leave()
        return self.last_reply()

    def cancel(self) -> None:
        """The client is gone."""
        self.leave()

    def resume(self) -> None:
        """The client reads its replies again: a monitor goes on."""
        self.queue.queues.wake(self.queue)


class Get(Consumer):
    """A get or a peek: one item."""

    def __init__(
        self,
        connection: Connection,
        queue: ServedQueue,
        found: Callable[[Item], bytes],
        nothing: bytes,
        *,
        peeks: bool = False,
    ) -> None:
        super().__init__(connection, queue, found, nothing)
        self.peeks = peeks

    def take(self, item: Item) -> None:
        self.queue.queues.count_hit()
        self.leave()
        self.connection.answer(self, self.found(item))


class Monitor(Consumer):
    """A monitor: items as they come, at most ``left`` of them. ``may_go_on`` says whether it may open one more read."""

    def __init__(
        self,
        connection: Connection,
        queue: ServedQueue,
        found: Callable[[Item], bytes],
        nothing: bytes,
        *,
        left: int,
        may_go_on: Callable[[], bool],
    ) -> None:
        super().__init__(connection, queue, found, nothing)
        self._left = left
        self._may_go_on = may_go_on

    def is_ready(self) -> bool:
        if not super().is_ready() or self.connection.is_stuck:
            return False
        if self.connection.is_full:  # the rest comes in another turn, if the client reads
            self.queue.queues.wake_later(self.queue)
            return False
        return True

    def end(self) -> None:
        self.dismiss()

    def take(self, item: Item) -> None:
        self.queue.queues.count_hit()
        self._left -= 1
        self.connection.say(self.found(item))
        if self._left and self._may_go_on():
            self.queue.leave(self)
            self.queue.enter(self)
        else:
            self.dismiss()

    def hang_up(self) -> bytes | None:
        self.leave()
        return self.last_reply()
