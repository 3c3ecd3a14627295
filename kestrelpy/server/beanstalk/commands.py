"""``Commands``: what each command does to the queue, and its reply.

A command returns its reply, or ``None`` if the reply comes later: from a future that the client waits for, or from a
long command that continues in the client's next turns. ``_REPLIES`` turns each error of the queue into a reply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from kestrelpy.errors import KestrelError, QueueDiskFull, QueueEmpty, QueueFull
from kestrelpy.server._connection import QueueProtocol
from kestrelpy.server._future_wait import FutureWait
from kestrelpy.server.beanstalk import replies
from kestrelpy.server.beanstalk.parser import BeanstalkParser
from kestrelpy.work import (
    DeadlineSoon,
    Draining,
    Job,
    JobNotFound,
    JobTooBig,
    NotReserved,
    Session,
    TubeNotFound,
    WorkQueue,
)

if TYPE_CHECKING:
    from kestrelpy.server._connection import Connection
    from kestrelpy.server.beanstalk.parser import Command

__all__ = ["Commands"]

KICK_SLICE = 200
"""How many jobs a ``kick`` moves before other clients are served: this takes some milliseconds."""

_REPLIES: tuple[tuple[type[Exception] | tuple[type[Exception], ...], bytes], ...] = (
    ((JobNotFound, NotReserved, TubeNotFound), replies.NOT_FOUND),
    (QueueEmpty, replies.TIMED_OUT),
    (DeadlineSoon, replies.DEADLINE_SOON),
    (Draining, replies.DRAINING),
    ((QueueFull, QueueDiskFull), replies.OUT_OF_MEMORY),
    (JobTooBig, replies.JOB_TOO_BIG),
)

_logger = logging.getLogger("kestrelpy.server")


class BeanstalkClient:
    """One client: its session, what it watches, and what the figures say of it."""

    def __init__(self, connection: Connection, parser: BeanstalkParser, session: Session) -> None:
        self.connection = connection
        self.parser = parser
        self.session = session
        self.watching = ["default"]  # in the order in which beanstalkd would list them
        self.places = {"default": 0}  # the index of each of them in ``watching``
        self.has_announced = False  # whether a put is counted whose body has not arrived
        self.announced_id = 0  # the id drawn for that put; 0: none
        self.is_producer = False
        self.is_worker = False

    def _check(self) -> None:
        self.parser._check()
        assert self.places == {tube: place for place, tube in enumerate(self.watching)}
        assert self.has_announced or not self.announced_id
        if not self.connection.is_finished:
            assert set(self.watching) == set(self.session.watching)


class Commands(QueueProtocol):
    """The beanstalkd protocol on one queue, and how often each command was given.

    A command that may have written to the journal sets ``wrote``; the caller that syncs clears it. ``figures`` makes
    the reply to ``stats``. ``queue`` is set before the first client comes.
    """

    queue: WorkQueue
    no_room = replies.OUT_OF_MEMORY
    failure = replies.INTERNAL_ERROR
    ends_at_failure = False

    def __init__(self, figures: Callable[[], bytes]) -> None:
        self.wrote = False
        self.counts = dict.fromkeys((*replies.COUNTED, "kick-job", "reserve-job"), 0)
        self._figures = figures
        self._do: dict[str, Callable[..., bytes | None]] = {
            "put": self._put,
            "reserve": self._reserve,
            "reserve-with-timeout": self._reserve_with_timeout,
            "delete": self._delete,
            "release": self._release,
            "bury": self._bury,
            "touch": self._touch,
            "use": self._use,
            "watch": self._watch,
            "ignore": self._ignore,
            "reserve-job": self._reserve_job,
            "peek": self._peek,
            "peek-ready": self._peek_ready,
            "peek-delayed": self._peek_delayed,
            "peek-buried": self._peek_buried,
            "kick": self._kick,
            "kick-job": self._kick_job,
            "stats": self._stats,
            "stats-job": self._stats_job,
            "stats-tube": self._stats_tube,
            "list-tubes": self._list_tubes,
            "list-tube-used": self._list_tube_used,
            "list-tubes-watched": self._list_tubes_watched,
            "pause-tube": self._pause_tube,
            "quit": self._quit,
            "refused": self._refused,
            "too-big": self._too_big,
            "expected-crlf": self._expected_crlf,
            "bad-put": self._bad_put,
            "bad-pause": self._bad_pause,
        }

    def parser(self) -> BeanstalkParser:
        return BeanstalkParser(self.queue.max_job_bytes)

    def client(self, connection: Connection, parser: BeanstalkParser) -> BeanstalkClient:
        return BeanstalkClient(connection, parser, self.queue.session())

    def leave(self, client: BeanstalkClient) -> None:
        client.session.close()

    def perform(self, client: BeanstalkClient, command: Command) -> bytes | None:
        """Do the command. Raises nothing: an error becomes a reply."""
        try:
            return self._do[command[0]](client, *command[1:])
        except Exception as error:
            return self.refusal(error)

    def proceed(self, _client: BeanstalkClient, long_command: Iterator[bytes | None]) -> bytes | None:
        """Do the next piece of a long command. Returns the reply after the last piece, ``None`` before that."""
        try:
            return next(long_command)
        except Exception as error:
            return self.refusal(error)

    def outcome(self, future: Future[Job]) -> bytes:
        """The reply to a reserve that had to wait."""
        error = future.exception()
        if error is None:
            job = future.result()
            return replies.reserved(job.id, job.body)
        return self.refusal(error)

    def refusal(self, error: BaseException) -> bytes:
        """The reply to a command that raised ``error``."""
        for kind, reply in _REPLIES:
            if isinstance(error, kind):
                return reply
        if isinstance(error, OSError | KestrelError):  # foreseen: the disk, or another owner of a queue that is shipped
            _logger.error("a client gets INTERNAL_ERROR, because its command failed: %s", error)
        else:
            _logger.error("a client gets INTERNAL_ERROR, because its command failed", exc_info=error)
        return replies.INTERNAL_ERROR

    # -- putting -----------------------------------------------------------------------------------------------------

    def starve(self, client: BeanstalkClient) -> None:
        """If a put's line has arrived, and its body has not: as beanstalkd does, count the put and draw its id now."""
        parser = client.parser
        if (parser.in_put or parser.in_big_put) and not client.has_announced:
            self.counts["put"] += 1
            client.has_announced = True
            if not parser.in_big_put:
                client.is_producer = True
                client.announced_id = self.queue.new_id()

    def _begin_put(self, client: BeanstalkClient) -> int:
        """The body has arrived too. Returns the id that ``starve`` drew, or 0."""
        if not client.has_announced:
            self.counts["put"] += 1
        job_id, client.announced_id, client.has_announced = client.announced_id, 0, False
        return job_id

    def _put(self, client: BeanstalkClient, priority: int, delay: int, ttr: int, body: bytes) -> bytes:
        client.is_producer = True
        announced_id = self._begin_put(client)
        self.wrote = True
        try:
            job_id = self.queue.put(
                body,
                tube=client.session.used,
                priority=priority,
                delay=delay,
                ttr=ttr,
                job_id=announced_id or None,
            )
        except KestrelError:
            if not announced_id:
                self.queue.new_id()  # a refused put uses up an id too, as in beanstalkd
            raise
        return b"INSERTED %d\r\n" % job_id

    def _too_big(self, client: BeanstalkClient) -> bytes:
        self._begin_put(client)
        return replies.JOB_TOO_BIG

    def _bad_put(self, _client: BeanstalkClient) -> bytes:
        self.counts["put"] += 1
        return replies.BAD_FORMAT

    def _expected_crlf(self, client: BeanstalkClient) -> bytes:
        client.is_producer = True
        if not self._begin_put(client):
            self.queue.new_id()
        return replies.EXPECTED_CRLF

    # -- reserving, and ending a reservation -------------------------------------------------------------------------

    def _reserve(self, client: BeanstalkClient) -> bytes | None:
        self.counts["reserve"] += 1
        return self._take(client, None)

    def _reserve_with_timeout(self, client: BeanstalkClient, seconds: int | None) -> bytes | None:
        self.counts["reserve-with-timeout"] += 1
        return self._take(client, seconds)

    def _take(self, client: BeanstalkClient, seconds: int | None) -> bytes | None:
        client.is_worker = True
        try:
            job = client.session.reserve(0)  # cheaper than a future, and mostly a job is ready
            return replies.reserved(job.id, job.body)
        except QueueEmpty:
            if seconds == 0 or client.connection.is_half_closed:  # a half-closed connection does not wait
                raise
        future = client.session.reserve_future(seconds)
        if future.done():
            return self.outcome(future)
        FutureWait(client.connection, future, self.outcome, replies.TIMED_OUT)
        return None

    def _reserve_job(self, client: BeanstalkClient, job_id: int) -> bytes:
        self.counts["reserve-job"] += 1
        job = client.session.reserve_job(job_id)
        client.is_worker = True
        return replies.reserved(job_id, job.body)

    def _delete(self, client: BeanstalkClient, job_id: int) -> bytes:
        self.counts["delete"] += 1
        self.wrote = True
        client.session.delete(job_id)
        return replies.DELETED

    def _release(self, client: BeanstalkClient, job_id: int, priority: int, delay: int) -> bytes:
        self.counts["release"] += 1
        self.wrote = True
        return replies.RELEASED if client.session.release(job_id, priority, delay) else replies.BURIED

    def _bury(self, client: BeanstalkClient, job_id: int, priority: int) -> bytes:
        self.counts["bury"] += 1
        self.wrote = True
        client.session.bury(job_id, priority)
        return replies.BURIED

    def _touch(self, client: BeanstalkClient, job_id: int) -> bytes:
        self.counts["touch"] += 1
        client.session.touch(job_id)
        return replies.TOUCHED

    # -- peeking -------------------------------------------------------------------------------------------------------

    def _peek(self, _client: BeanstalkClient, job_id: int) -> bytes:
        self.counts["peek"] += 1
        return _found(self.queue.peek(job_id))

    def _peek_ready(self, client: BeanstalkClient) -> bytes:
        self.counts["peek-ready"] += 1
        return _found(self.queue.peek_ready(client.session.used))

    def _peek_delayed(self, client: BeanstalkClient) -> bytes:
        self.counts["peek-delayed"] += 1
        return _found(self.queue.peek_delayed(client.session.used))

    def _peek_buried(self, client: BeanstalkClient) -> bytes:
        self.counts["peek-buried"] += 1
        return _found(self.queue.peek_buried(client.session.used))

    # -- kicking -------------------------------------------------------------------------------------------------------

    def _kick(self, client: BeanstalkClient, count: int) -> bytes | None:
        self.counts["kick"] += 1
        self.wrote = True
        if count <= KICK_SLICE:
            return b"KICKED %d\r\n" % self.queue.kick(count, client.session.used)
        client.connection.long_command = self._kick_many(client.session.used, count)
        return None

    def _kick_many(self, tube: str, count: int) -> Iterator[bytes | None]:
        """Kick in slices: only buried jobs, if there are any at the beginning; otherwise only delayed ones."""
        kicked = 0
        of_buried = self.queue.stats_tube(tube).buried > 0
        while kicked < count:
            there = self.queue.stats_tube(tube)
            if of_buried != (there.buried > 0):
                break
            wanted = min(KICK_SLICE, count - kicked, there.buried if of_buried else there.delayed)
            self.wrote = True
            got = self.queue.kick(wanted, tube) if wanted else 0
            kicked += got
            if got < KICK_SLICE:
                break
            yield None
        yield b"KICKED %d\r\n" % kicked

    def _kick_job(self, _client: BeanstalkClient, job_id: int) -> bytes:
        self.counts["kick-job"] += 1
        self.wrote = True
        self.queue.kick_job(job_id)
        return replies.KICKED_ONE

    # -- tubes ---------------------------------------------------------------------------------------------------------

    def _use(self, client: BeanstalkClient, tube: str) -> bytes:
        self.counts["use"] += 1
        client.session.use(tube)
        return b"USING %b\r\n" % tube.encode("ascii")

    def _watch(self, client: BeanstalkClient, tube: str) -> bytes:
        self.counts["watch"] += 1
        if tube not in client.places:
            client.session.watch(tube)
            client.places[tube] = len(client.watching)
            client.watching.append(tube)
        return b"WATCHING %d\r\n" % len(client.watching)

    def _ignore(self, client: BeanstalkClient, tube: str) -> bytes:
        """Stop watching a tube. The last tube of the list takes its place, as in beanstalkd."""
        self.counts["ignore"] += 1
        watching, places = client.watching, client.places
        if tube in places:
            if len(watching) == 1:
                return replies.NOT_IGNORED
            client.session.ignore(tube)
            places[watching[-1]] = place = places[tube]
            watching[place] = watching[-1]
            watching.pop()
            del places[tube]
        return b"WATCHING %d\r\n" % len(watching)

    def _list_tubes(self, _client: BeanstalkClient) -> bytes:
        self.counts["list-tubes"] += 1
        return replies.names(self.queue.tubes())

    def _list_tube_used(self, client: BeanstalkClient) -> bytes:
        self.counts["list-tube-used"] += 1
        return b"USING %b\r\n" % client.session.used.encode("ascii")

    def _list_tubes_watched(self, client: BeanstalkClient) -> bytes:
        self.counts["list-tubes-watched"] += 1
        return replies.names(client.watching)

    def _pause_tube(self, _client: BeanstalkClient, tube: str, seconds: int) -> bytes:
        self.counts["pause-tube"] += 1
        self.wrote = True
        self.queue.pause_tube(tube, seconds)
        return replies.PAUSED

    def _bad_pause(self, _client: BeanstalkClient) -> bytes:
        self.counts["pause-tube"] += 1
        return replies.BAD_FORMAT

    # -- figures, and the rest -----------------------------------------------------------------------------------------

    def _stats(self, _client: BeanstalkClient) -> bytes:
        self.counts["stats"] += 1
        return self._figures()

    def _stats_job(self, _client: BeanstalkClient, job_id: int) -> bytes:
        self.counts["stats-job"] += 1
        return replies.stats_job(self.queue.stats_job(job_id))

    def _stats_tube(self, _client: BeanstalkClient, tube: str) -> bytes:
        self.counts["stats-tube"] += 1
        return replies.stats_tube(self.queue.stats_tube(tube))

    def _quit(self, client: BeanstalkClient) -> None:
        client.connection.finish()

    def _refused(self, _client: BeanstalkClient, reply: bytes) -> bytes:
        return reply


def _found(job: Any) -> bytes:
    return replies.found(job.id, job.body)
