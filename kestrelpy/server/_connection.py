"""``Connection``: one client, with its bytes, its turn and its replies. What it needs of the client's protocol:
``QueueProtocol``, with a ``Parser``.

1. Everything runs on the loop's thread.
2. A client is not served while it waits (``wait_for``), does not read its replies, or has had its slice of the turn.
   What it sends meanwhile is kept, up to ``MAX_HELD_BYTES``; above that the server does not read from it
   (back-pressure).
3. A half-closed connection (the client sends no more) still gets the replies to its commands. If it waits, it gets the
   reply of one that has waited in vain.
4. When the connection is gone, or the client has quit, ``QueueProtocol.leave`` gives back what it holds.
"""

from __future__ import annotations

import asyncio
import logging
import select
import threading
from collections.abc import Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from kestrelpy.server._rounds import Rounds

__all__ = ["Connection", "Parser", "QueueProtocol", "Wait"]

COMMANDS_PER_TURN = 100
"""How many commands of a client run before other clients are served: this takes about a millisecond."""

TURN_SECONDS = 0.002
"""How long commands of a client run before other clients are served: some commands take long, such as a reserve by a
client that watches very many tubes."""

MAX_HELD_BYTES = 64 * 1024
"""How many bytes a client may send ahead. asyncio reads up to 256 KiB at a time, so more than this may be held."""

MAX_REPLY_BYTES = 256 * 1024
"""A client's turn ends when its replies exceed this: a short command can ask for a large job."""

_logger = logging.getLogger("kestrelpy.server")


class Parser(Protocol):
    """Turns the bytes of one client into commands. It does no I/O, and no input raises an error."""

    def feed(self, data: bytes) -> None:
        """These bytes have arrived."""

    def next(self) -> Any:
        """The next command, in whatever form ``QueueProtocol.perform`` takes it; ``None`` if none is complete."""

    @property
    def held(self) -> int:
        """How many bytes are kept that no command has used yet, without an incomplete body."""

    def trim(self) -> None:
        """The client will be quiet for a while: free what can be freed. May do nothing."""
        return


class QueueProtocol(Protocol):
    """What one kind of client may say, and what it gets. One object serves all clients. All calls are on the loop.

    Derive from it. ``client`` below is the object that the call of that name has made for a client.
    """

    no_room: bytes = b""
    """What a client gets for whom there is no room, before its connection is closed."""
    failure: bytes = b""
    """What replaces each reply of a turn whose changes could not be made durable."""
    ends_at_failure: bool = False
    """Whether ``failure`` is sent once, and the connection is closed after it."""

    def parser(self) -> Parser:
        """A parser for a new client."""

    def client(self, connection: Connection, parser: Any) -> Any:
        """The state of a new client, whose bytes ``parser`` gets."""

    def perform(self, client: Any, command: Any) -> bytes | None:
        """Do the command and return its reply. Raises nothing: an error becomes a reply.

        Returns ``None`` if the reply comes later: after ``connection.wait_for``, or from a long command.
        """

    def leave(self, client: Any) -> None:
        """The client is gone, or has quit: give back what it holds. Called once."""

    def starve(self, client: Any) -> None:  # noqa: ARG002 - for those that derive from it
        """The client has sent a part of a command, or nothing, and all before it is done. May do nothing."""
        return

    def proceed(self, client: Any, long_command: Iterator[bytes | None]) -> bytes | None:  # noqa: ARG002 - as above
        """Do the next piece of a long command. Returns the reply after the last piece, ``None`` before that."""
        return next(long_command)


class Wait(Protocol):
    """Something that a client waits for: a job, an item, a time. ``Connection.answer`` ends it."""

    def hang_up(self) -> bytes | None:
        """The client sends no more, and so waits no longer. Returns its reply; ``None`` if an answer is on its way."""

    def cancel(self) -> None:
        """The client is gone."""

    def resume(self) -> None:
        """The client reads its replies again, after a while in which it did not. May do nothing."""


class ConnectionHost(Protocol):
    """The part of its server that a connection uses."""

    rounds: Rounds
    loop: asyncio.AbstractEventLoop
    monotonic: Callable[[], float]
    bytes_read: int
    bytes_written: int

    def admit(self, connection: Connection) -> bool:
        """Whether there is room for one more client."""

    def forget(self, connection: Connection) -> None:
        """The client is gone."""

    def watch_over(self, connection: Connection) -> None:
        """The client is not read from: look from time to time whether it has hung up."""


class Connection(asyncio.Protocol):
    """The asyncio protocol of one connection. The server makes it; it reports to the server when it is gone.

    ``client`` is the state that the protocol keeps for this client.
    """

    client: Any = None

    def __init__(self, server: ConnectionHost, protocol: QueueProtocol) -> None:
        self.protocol = protocol
        self._server = server
        self._rounds = server.rounds
        self._parser = protocol.parser()
        self._transport: asyncio.Transport
        self._thread = threading.get_ident()
        self.served_at = 0.0  # when a command was done last, by ``monotonic``
        self.is_half_closed = False  # the client sends no more, and does not wait
        self.is_finished = False  # no more commands are done; replies are still sent
        self._is_at_end = False  # all that the client sent has been read
        self.long_command: Iterator[bytes | None] | None = None  # a command that takes several turns
        self._waiting: Wait | None = None
        self._is_open = False
        self._is_stuck = False  # the client does not read its replies
        self._is_unread = False  # the client has sent too much ahead, and is not read from
        self._replies: list[bytes] = []
        self._reply_bytes = 0

    def _check(self) -> None:
        assert self._reply_bytes == sum(map(len, self._replies))
        assert not (self.is_finished and self._waiting is not None)

    # -- calls from asyncio --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not derived from it
        if not self._server.admit(self):
            self._transport.write(self.protocol.no_room)
            self._transport.close()
            return
        self.served_at = self._server.monotonic()
        self.client = self.protocol.client(self, self._parser)
        self._is_open = True

    def data_received(self, data: bytes) -> None:
        if not self._is_open:
            return
        self._server.bytes_read += len(data)
        self._parser.feed(data)
        self.run()

    def eof_received(self) -> bool:
        """Keep the other direction open, because there may be replies to send: rule 3."""
        self._is_at_end = True
        self._has_hung_up()
        return self._is_open

    def _has_hung_up(self) -> None:
        self.is_half_closed = True
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            reply = waiting.hang_up()
            if reply is None:
                self._waiting = waiting  # the answer is on its way to the loop's thread
            else:
                self.say(reply)
        self._rounds.again(self)

    def pause_writing(self) -> None:
        self._is_stuck = True

    def resume_writing(self) -> None:
        self._is_stuck = False
        if self._waiting is not None:
            self._waiting.resume()
        if self._is_open:
            self._rounds.again(self)

    def connection_lost(self, _error: BaseException | None) -> None:
        self._rounds.forget(self)
        if self._is_open:
            self._is_open = False
            self._leave()
            self._server.forget(self)
        self.client = None  # it refers to this connection: see _break_cycles
        self.long_command = None
        self._replies.clear()
        self._reply_bytes = 0
        _break_cycles(self._transport)

    # -- the client's turn ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Do a slice of the commands that this client has sent."""
        client, perform, next_command = self.client, self.protocol.perform, self._parser.next
        monotonic = self._server.monotonic
        self.served_at = now = monotonic()
        end = now + TURN_SECONDS
        for _ in range(COMMANDS_PER_TURN):
            if self._waiting is not None or self._is_stuck or self.is_finished or not self._is_open:
                break
            if self.long_command is not None:
                reply = self.protocol.proceed(client, self.long_command)
                if reply is None:
                    self._rounds.again(self)
                    break
                self.long_command = None
            else:
                command = next_command()
                if command is None:
                    self.protocol.starve(client)
                    if self._is_at_end:
                        self.finish()
                    break
                reply = perform(client, command)
            if reply is not None:
                self._replies.append(reply)
                self._reply_bytes += len(reply)
                if self._reply_bytes > MAX_REPLY_BYTES:
                    self._rounds.again(self)
                    break
            if monotonic() > end:
                self._rounds.again(self)
                break
        else:
            self._rounds.again(self)
        if self._replies or self.is_finished:
            self._deliver()
        self._update_reading()

    def _deliver(self) -> None:
        if self._rounds.holds_replies:
            self._rounds.send_later(self)
        else:
            self.flush()

    # -- calls from the protocol ---------------------------------------------------------------------------------------

    def say(self, reply: bytes) -> None:
        """Send this at the end of the turn, beside the replies that ``perform`` returns."""
        self._replies.append(reply)
        self._reply_bytes += len(reply)
        self._rounds.send_later(self)

    def finish(self) -> None:
        """The client has quit or hung up: it leaves at once, and its replies are still sent."""
        if not self.is_finished:
            self._leave()
            self._rounds.send_later(self)

    def hang_up(self) -> None:
        """Close the connection once its replies are sent: the server stops, or serving this client has failed."""
        self._leave()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once: the client does not read what it is sent."""
        self._leave()
        self._transport.abort()

    def _leave(self) -> None:
        if self.is_finished:
            return
        self.is_finished = True
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.cancel()
        try:
            self.protocol.leave(self.client)
        except Exception:
            _logger.exception("what a closed connection held could not all be given back")

    @property
    def is_open(self) -> bool:
        """Whether the client may still read what it is sent. A loop may tell later that a connection was lost."""
        return self._is_open and not self._transport.is_closing()

    @property
    def is_stuck(self) -> bool:
        """Whether the client does not read its replies."""
        return self._is_stuck

    @property
    def is_full(self) -> bool:
        """Whether this turn has as many bytes of replies for the client as a turn may have."""
        return self._reply_bytes > MAX_REPLY_BYTES

    # -- waiting -------------------------------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Whether the client waits, and is not served."""
        return self._waiting is not None

    def wait_for(self, wait: Wait) -> None:
        """Serve this client no more until ``answer`` is called, on the loop's thread."""
        self._waiting = wait
        self._parser.trim()

    def waits_for(self, wait: Wait) -> bool:
        """Whether the client still waits for this."""
        return self._waiting is wait

    def answer(self, wait: Wait, reply: bytes) -> None:
        """The client has what it waited for: send it the reply, and serve it again. No effect if it waits no more."""
        if self._waiting is wait:
            self._waiting = None
            self.served_at = self._server.monotonic()
            self.say(reply)
            self._rounds.again(self)

    def give_up(self, reply: bytes) -> None:
        """The client does not get what it waits for, if it waits: send it this reply. An answer that is on its way has
        no effect then.
        """
        wait, self._waiting = self._waiting, None
        if wait is not None:
            self.say(reply)
            wait.cancel()

    def on_loop(self, call: Callable[[], object]) -> None:
        """Make this call on the loop's thread: at once if this is that thread."""
        if threading.get_ident() == self._thread:
            call()
        else:
            self._server.loop.call_soon_threadsafe(call)

    # -- replies -------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send the replies; then close the connection, if the client is finished."""
        if self._replies:
            data = b"".join(self._replies)
            self._replies.clear()
            self._server.bytes_written += self._reply_bytes
            self._reply_bytes = 0
            self._transport.write(data)
        if self.is_finished:
            self._transport.close()

    def take_back_replies(self) -> None:
        """Replace the replies of this turn: the changes that they acknowledge are not durable."""
        failure = self.protocol.failure
        self._replies[:] = [failure] * len(self._replies)
        if self.protocol.ends_at_failure:
            del self._replies[1:]
            self._leave()
        self._reply_bytes = len(failure) * len(self._replies)

    # -- bytes that are sent ahead -------------------------------------------------------------------------------------

    def _update_reading(self) -> None:
        is_too_much = self._parser.held > MAX_HELD_BYTES
        if is_too_much == self._is_unread or not self._is_open:
            return
        self._is_unread = is_too_much
        if is_too_much:
            self._transport.pause_reading()
            self._server.watch_over(self)
        else:
            self._transport.resume_reading()

    def look_for_hanging_up(self) -> bool:
        """Look whether a client that waits and is not read from has hung up. True if it is still not read from."""
        if self._is_open and self._is_unread and self.is_waiting:
            socket = self._transport.get_extra_info("socket")
            if socket is not None and socket.fileno() >= 0:
                poll = select.poll()
                poll.register(socket.fileno(), select.POLLRDHUP)
                if poll.poll(0):
                    self._has_hung_up()
        return self._is_open and self._is_unread


def _break_cycles(transport: asyncio.Transport) -> None:
    """Break the reference cycles of a closed transport: so it is freed with the last reference to it.

    A transport of asyncio holds bound methods of itself. The server's process does not collect old objects
    (``_spare_the_collector`` in ``_process``): there, each connection would leave a kilobyte in memory for ever.
    """
    held = getattr(transport, "__dict__", {})
    for name in [name for name, made in held.items() if isinstance(made, MethodType) and made.__self__ is transport]:
        del held[name]
