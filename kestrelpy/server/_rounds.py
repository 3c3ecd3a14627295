"""``Rounds``: when each client is served, and when replies are sent.

One turn is one round of the event loop. Every client that is ready is served, each for one slice at most. Then, if the
server commits before it replies, what all clients have changed is committed, once (group commit). Then all replies of
the turn are sent. So a client delays the others by no more than one slice, and all clients of a turn share one sync.

This relies on the order in which asyncio runs callbacks: a callback that ``call_soon`` gets in one round runs first in
the next round, before the sockets that have become readable since.
"""

from __future__ import annotations

import logging
from asyncio import AbstractEventLoop
from collections.abc import Callable
from typing import Protocol

__all__ = ["Rounds"]

_logger = logging.getLogger("kestrelpy.server")


class RoundClient(Protocol):
    """The part of a ``Connection`` that a turn uses."""

    def run(self) -> None:
        """Do a slice of the client's commands."""

    def flush(self) -> None:
        """Send the client's replies."""

    def take_back_replies(self) -> None:
        """Replace the client's replies: its changes are not durable."""

    def hang_up(self) -> None:
        """Close the connection: serving this client has failed."""


class Rounds:
    """The rounds of one server. All calls are on the loop's thread.

    ``commit``, if it is not ``None``, makes the turn's changes durable before its replies are sent; it may add replies
    to the turn. If it raises, the replies of that turn are taken back, and ``on_failure`` gets the error.
    """

    def __init__(
        self,
        loop: AbstractEventLoop,
        commit: Callable[[], None] | None,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._loop = loop
        self._commit = commit
        self._on_failure = on_failure
        self._speaking: dict[RoundClient, None] = {}
        self._busy: dict[RoundClient, None] = {}
        self._is_ending = False

    @property
    def holds_replies(self) -> bool:
        return self._commit is not None

    def send_later(self, client: RoundClient) -> None:
        """The client has replies: send them at the end of this turn."""
        self._speaking[client] = None
        self.schedule()

    def again(self, client: RoundClient) -> None:
        """The client has sent more commands: serve it again in the next turn."""
        self._busy[client] = None
        self.schedule()

    def next_turn(self, call: Callable[[], None]) -> None:
        """Make this call when this turn is over."""
        self._loop.call_soon(call)

    def forget(self, client: RoundClient) -> None:
        self._speaking.pop(client, None)
        self._busy.pop(client, None)

    def schedule(self) -> None:
        """End this turn, though no client has replies: ``commit`` has something to do."""
        if not self._is_ending:
            self._is_ending = True
            self._loop.call_soon(self._end)

    def _end(self) -> None:
        failure: Exception | None = None
        if self._commit is not None:
            try:
                self._commit()
            except Exception as error:
                failure = error
        self._is_ending = False
        speaking, self._speaking = self._speaking, {}
        busy, self._busy = self._busy, {}
        if failure is not None:
            for client in speaking:
                client.take_back_replies()
            self._on_failure(failure)
        for client in speaking:
            self._call_safely(client, client.flush)
        for client in busy:
            self._call_safely(client, client.run)

    def _call_safely(self, client: RoundClient, call: Callable[[], None]) -> None:
        """Make ``call``. If it fails, for want of memory for its replies, say, only this client is disconnected."""
        try:
            call()
        except Exception:
            _logger.exception("a client is disconnected, because serving it failed")
            client.hang_up()
