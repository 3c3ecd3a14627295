"""Who is served when, and when replies go out.

One turn is one round of the event loop: every client that is ready is served, each no more than a slice; then, if the
server syncs before it replies and anything was written, the queue is synced, once; then all replies of that turn go
out. So no client keeps the others waiting for longer than a slice, and a sync is shared by all who wait for it.

It relies on the order in which asyncio runs what it was given: what ``call_soon`` takes in one round runs first in the
next one, before what has become readable since.
"""

from __future__ import annotations

import logging
from asyncio import AbstractEventLoop
from collections.abc import Callable
from typing import Protocol

__all__ = ["Rounds"]

_logger = logging.getLogger("kestrelpy.server")


class RoundClient(Protocol):
    """What a turn does with a client: a ``Connection``."""

    def run(self) -> None:
        """Do a slice of what it asked for."""

    def flush(self) -> None:
        """Send its replies."""

    def take_back_replies(self) -> None:
        """What they say has not come true."""

    def hang_up(self) -> None:
        """There is trouble with it."""


class Rounds:
    """The rounds of one server. All on the loop's thread.

    ``commit``, if there is one, makes the turn's changes durable before its replies go out. If it raises, the clients
    of that turn get INTERNAL_ERROR, and ``on_failure`` gets the error.
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

    def speak(self, client: RoundClient) -> None:
        """It has replies: send them at the end of this turn."""
        self._speaking[client] = None
        self._see_to_the_end()

    def again(self, client: RoundClient) -> None:
        """It has more to do: serve it in the next turn."""
        self._busy[client] = None
        self._see_to_the_end()

    def forget(self, client: RoundClient) -> None:
        self._speaking.pop(client, None)
        self._busy.pop(client, None)

    def _see_to_the_end(self) -> None:
        if not self._is_ending:
            self._is_ending = True
            self._loop.call_soon(self._end)

    def _end(self) -> None:
        self._is_ending = False
        speaking, self._speaking = self._speaking, {}
        busy, self._busy = self._busy, {}
        if self._commit is not None:
            try:
                self._commit()
            except Exception as error:
                for client in speaking:
                    client.take_back_replies()
                self._on_failure(error)
        for client in speaking:
            self._see_to(client, client.flush)
        for client in busy:
            self._see_to(client, client.run)

    def _see_to(self, client: RoundClient, call: Callable[[], None]) -> None:
        """What goes wrong with one client, such as memory for its replies, ends that one, and the others are served."""
        try:
            call()
        except Exception:
            _logger.exception("a client is dropped")
            client.hang_up()
