"""``FutureWait``: a client that waits for a future of the library, such as that of ``get_future``."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kestrelpy.server._connection import Connection

__all__ = ["FutureWait"]


class FutureWait:
    """A client waits for a future, which any thread may complete. ``reply`` makes its outcome the client's reply."""

    __slots__ = ("_connection", "_future", "_late", "_reply")

    def __init__(
        self, connection: Connection, future: Future[Any], reply: Callable[[Future[Any]], bytes], late: bytes
    ) -> None:
        """``late``: the reply if the client sends no more, and so does not wait."""
        self._connection = connection
        self._future: Future[Any] | None = future  # None at the end: the future refers to this object
        self._reply = reply
        self._late = late
        connection.wait_for(self)
        future.add_done_callback(self._on_done)

    def _on_done(self, future: Future[Any]) -> None:
        self._connection.on_loop(partial(self._answer, future))

    def _answer(self, future: Future[Any]) -> None:
        self._future = None
        if self._connection.waits_for(self):
            self._connection.answer(self, self._reply(future))

    def hang_up(self) -> bytes | None:
        """Cancel the future. Returns ``late``; ``None`` if the future is done already."""
        if self._future is None or not self._future.cancel():
            return None
        self._future = None
        return self._late

    def cancel(self) -> None:
        """Cancel the future."""
        future, self._future = self._future, None
        if future is not None:
            future.cancel()

    def resume(self) -> None:
        """Nothing: the future does not depend on whether the client reads."""
