"""``Connection``: one client, with its bytes, its session and its replies.

1. Everything runs on the loop's thread. Only the future of a reserve may be completed by another thread; the reply is
   then made on the loop's thread.
2. A client is not served while it waits for a job, does not read its replies, or has had its slice of the turn. What it
   sends meanwhile is kept, up to ``MAX_HELD_BYTES``; above that the server does not read from it (back-pressure).
3. A half-closed connection (the client sends no more) still gets the replies to its commands. If it waits for a job, it
   gets TIMED_OUT.
4. When the connection is gone, its session is closed: its jobs are ready again, and it waits in no line.
"""

from __future__ import annotations

import asyncio
import logging
import select
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import MethodType
from typing import TYPE_CHECKING, Protocol

from kestrelpy.server import _replies as replies
from kestrelpy.server._parser import Parser
from kestrelpy.work import Job, Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from kestrelpy.server._commands import Commands
    from kestrelpy.server._rounds import Rounds
    from kestrelpy.work import WorkQueue

__all__ = ["Connection"]

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


class ConnectionHost(Protocol):
    """The part of its server that a connection uses."""

    queue: WorkQueue
    rounds: Rounds
    commands: Commands
    loop: asyncio.AbstractEventLoop
    monotonic: Callable[[], float]

    def admit(self, client: Connection) -> bool:
        """Whether there is room for one more client."""

    def forget(self, client: Connection) -> None:
        """The client is gone."""

    def watch_over(self, client: Connection) -> None:
        """The client is not read from: look from time to time whether it has hung up."""


class Connection(asyncio.Protocol):
    """The asyncio protocol of one connection. The server makes it; it tells the server when it is gone."""

    def __init__(self, server: ConnectionHost) -> None:
        self._server = server
        self._rounds = server.rounds
        self._commands = server.commands
        self._parser = Parser(server.queue.max_job_bytes)
        self._transport: asyncio.Transport
        self._thread = threading.get_ident()
        self.session: Session
        self.watching = ["default"]  # in the order in which beanstalkd would list them
        self.places = {"default": 0}  # the index of each of them in ``watching``
        self.has_announced = False  # whether a put is counted whose body has not arrived
        self.announced_id = 0  # the id drawn for that put; 0: none
        self.is_producer = False
        self.is_worker = False
        self.is_half_closed = False  # the client sends no more, and does not wait for jobs
        self._is_at_end = False  # all that the client sent has been read
        self.long_command: Iterator[bytes | None] | None = None  # a command that takes several turns
        self._waiting: Future[Job] | None = None
        self._is_open = False
        self._is_finished = False  # no more commands are done; replies are still sent
        self._is_stuck = False  # the client does not read its replies
        self._is_unread = False  # the client has sent too much ahead, and is not read from
        self._replies: list[bytes] = []
        self._reply_bytes = 0

    def _check(self) -> None:
        self._parser._check()
        assert self.places == {tube: place for place, tube in enumerate(self.watching)}
        assert self._reply_bytes == sum(map(len, self._replies))
        assert self.has_announced or not self.announced_id
        assert not (self._is_finished and self._waiting is not None)
        if self._is_open and not self._is_finished:
            assert set(self.watching) == set(self.session.watching)

    # -- calls from asyncio --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if not self._server.admit(self):
            transport.write(replies.OUT_OF_MEMORY)
            transport.close()
            return
        self.session = self._server.queue.session()
        self._is_open = True

    def data_received(self, data: bytes) -> None:
        if not self._is_open:
            return
        self._parser.feed(data)
        self.run()

    def eof_received(self) -> bool:
        """Keep the other direction open, because there may be replies to send: rule 3."""
        self._is_at_end = True
        self._has_hung_up()
        return self._is_open

    def _has_hung_up(self) -> None:
        self.is_half_closed = True
        self._stop_waiting()
        self._rounds.again(self)

    def pause_writing(self) -> None:
        self._is_stuck = True

    def resume_writing(self) -> None:
        self._is_stuck = False
        if self._is_open:
            self._rounds.again(self)

    def connection_lost(self, _error: BaseException | None) -> None:
        self._rounds.forget(self)
        if self._is_open:
            self._is_open = False
            self._finish_session()
            self._server.forget(self)
        self.long_command = None
        self._replies.clear()
        self._reply_bytes = 0
        _break_cycles(self._transport)

    # -- the client's turn ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Do a slice of the commands that this client has sent."""
        perform, next_command = self._commands.perform, self._parser.next
        monotonic = self._server.monotonic
        end = monotonic() + TURN_SECONDS
        for _ in range(COMMANDS_PER_TURN):
            if self._waiting is not None or self._is_stuck or self._is_finished or not self._is_open:
                break
            if self.long_command is not None:
                reply = self._commands.proceed(self.long_command)
                if reply is None:
                    self._rounds.again(self)
                    break
                self.long_command = None
            else:
                command = next_command()
                if command is None:
                    self._out_of_commands()
                    break
                reply = perform(self, command)
            if reply is not None:
                self._say(reply)
                if self._reply_bytes > MAX_REPLY_BYTES:
                    self._rounds.again(self)
                    break
            if monotonic() > end:
                self._rounds.again(self)
                break
        else:
            self._rounds.again(self)
        if self._replies or self._is_finished:
            self._deliver()
        self._update_reading()

    def _out_of_commands(self) -> None:
        """No complete command is left."""
        if self._parser.in_put or self._parser.in_big_put:
            self._commands.announce_put(self, is_too_big=self._parser.in_big_put)
        if self._is_at_end:
            self.finish()

    def _say(self, reply: bytes) -> None:
        self._replies.append(reply)
        self._reply_bytes += len(reply)

    def _deliver(self) -> None:
        if self._rounds.holds_replies:
            self._rounds.send_later(self)
        else:
            self.flush()

    def flush(self) -> None:
        """Send the replies; then close the connection, if the client is finished."""
        if self._replies:
            data = b"".join(self._replies)
            self._replies.clear()
            self._reply_bytes = 0
            self._transport.write(data)
        if self._is_finished:
            self._transport.close()

    def take_back_replies(self) -> None:
        """Replace the replies of this turn by INTERNAL_ERROR: the changes that they acknowledge are not durable."""
        self._replies[:] = [replies.INTERNAL_ERROR] * len(self._replies)
        self._reply_bytes = len(replies.INTERNAL_ERROR) * len(self._replies)

    def finish(self) -> None:
        """The client has quit or hung up: its jobs are ready again at once, and its replies are still sent."""
        if not self._is_finished:
            self._finish_session()
            self._rounds.send_later(self)

    def hang_up(self) -> None:
        """Close the connection: the server stops, or serving this client has failed."""
        self._finish_session()
        self._transport.close()

    def _finish_session(self) -> None:
        self._is_finished = True
        future, self._waiting = self._waiting, None
        if future is not None:
            future.cancel()
        try:
            self.session.close()
        except Exception:
            _logger.exception("the jobs of a closed connection could not all be given back")

    # -- waiting for a job ---------------------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        return self._waiting is not None

    def wait_for(self, future: Future[Job]) -> None:
        """Serve this client no more until ``future`` is done."""
        self._waiting = future
        self._parser.trim()
        future.add_done_callback(self._on_job)

    def _on_job(self, future: Future[Job]) -> None:
        if threading.get_ident() == self._thread:
            self._be_served(future)
        else:
            self._server.loop.call_soon_threadsafe(self._be_served, future)

    def _be_served(self, future: Future[Job]) -> None:
        if self._waiting is not future:
            return  # the client does not wait any more
        self._waiting = None
        self._say(self._commands.outcome(future))
        self._rounds.send_later(self)
        self._rounds.again(self)

    def _stop_waiting(self) -> None:
        future, self._waiting = self._waiting, None
        if future is None:
            return
        if future.cancel():
            self._say(replies.TIMED_OUT)
            self._rounds.send_later(self)
        else:
            self._waiting = future  # a job is on its way to the loop's thread

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
    (``_spare_the_collector``): there, each connection would leave a kilobyte in memory for ever.
    """
    held = getattr(transport, "__dict__", {})
    for name in [name for name, made in held.items() if isinstance(made, MethodType) and made.__self__ is transport]:
        del held[name]
