"""Two servers, the same commands at the same instants, and every byte of the answers compared.

Rules:
1. One of them is the real beanstalkd, under libfaketime: its time stands still until the file it is read from is
   rewritten. Ours runs in this process on a loop that only turns when it is told to, on a manual clock.
2. A step is over on a server when a command on a connection of the harness, sent after it, has been answered: a server
   reads what came first first. What others have not been answered by then, they will not be without another step. That
   command is ``stats``, so all counters are compared after each step too.
3. No two things that differ are due at one instant: every step moves the time by two milliseconds, and on the way to a
   later time the harness stops just behind everything that falls due (our clock knows when that is), so that what
   happens first happens first on both.
4. beanstalkd lets a time to run pass only *after* its deadline: where something falls due its clock shows some
   microseconds more than ours, and more at each stop.
5. Who of several waiting connections gets a job is not the same by promise (``DIFFERENCES``): a sequence in which
   this could show does without the second one.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.server.differential_sequences import KEEPER, TUBES, Close, Drain, Move, Open, Send, Step, are_apart
from tests.server.differential_servers import PATIENCE, SECOND, Beanstalkd, Server

GRID = SECOND // 512
"""What a step takes: so that all times are exact in binary, and no two of a sequence are whole seconds apart."""
LAG = 5_000
"""By how much more the real one is behind at each further stop, rule 4."""


# -- what is compared ------------------------------------------------------------------------------------------------

OF_A_PROCESS = (
    b"pid",
    b"uptime",
    b"version",
    b"rusage-utime",
    b"rusage-stime",
    b"id",
    b"binlog-oldest-index",
    b"binlog-current-index",
    b"binlog-records-migrated",
    b"binlog-records-written",
)
"""Keys of ``stats`` whose values are of one process, or of a journal that is of another kind."""
_MASKED = re.compile(rb"^(" + b"|".join(OF_A_PROCESS) + rb"): .*$", re.MULTILINE)
_WORD = re.compile(rb"^(?:[A-Z_]{2,}|\(closed\))", re.MULTILINE)
_HALF = re.compile(rb"OK \d+\r\n---\nid: \d+\ntube: [^\n]+\nstate: invalid\n.*?\n\r\n", re.DOTALL)
"""A job whose body has not come yet: the real one tells of it, ours does not (``DIFFERENCES``)."""
_FILE = re.compile(rb"^file: \d$", re.MULTILINE)
_STATS = re.compile(rb"OK (\d+)\r\n(---\ncurrent-jobs-urgent: .*?\n)\r\n", re.DOTALL)


def masked(answer: bytes) -> bytes:
    """An answer without what two servers cannot agree on: ``OF_A_PROCESS``, the length of that text, files."""
    if b"\nfile: " in answer:
        answer = _FILE.sub(b"file: *", answer)
    return _STATS.sub(_mask, answer) if b"current-jobs-urgent" in answer else answer


def _mask(found: re.Match[bytes]) -> bytes:
    length = b"*" if int(found[1]) == len(found[2]) else b"a wrong length: " + found[1]
    return b"OK %b\r\n%b\r\n" % (length, _MASKED.sub(rb"\1: *", found[2]))


def _timeouts(stats: bytes) -> int:
    found = re.search(rb"^job-timeouts: (\d+)$", stats, re.MULTILINE)
    assert found is not None
    return int(found[1])


_TUBES = re.compile(rb"---\n(- .*?\n)\r\n", re.DOTALL)


def _sort(found: re.Match[bytes]) -> bytes:
    return b"---\n%b\r\n" % b"".join(sorted(found[1].splitlines(keepends=True)))


@dataclass
class Difference:
    """Two servers that do not agree: after which step, on which connection, and what each has said."""

    step: int
    connection: str
    answers: dict[str, bytes]
    known: str = ""
    """Which of ``DIFFERENCES`` it is: the sequence cannot go on, and nothing is wrong."""

    def __str__(self) -> str:
        """One line a server; of long answers, the lines that differ."""
        lines = {name: answer.split(b"\n") for name, answer in self.answers.items()}
        if min(map(len, lines.values())) > 3:
            first, second = lines.values()
            if sorted(first) != sorted(second):
                for name, mine, other in zip(lines, (first, second), (second, first), strict=True):
                    lines[name] = [b"...", *(line for line in mine if line not in other)]
        said = "".join(f"\n    {name:>12}: {b' '.join(line)!r}" for name, line in lines.items())
        return f"after step {self.step}, {self.connection}:{said}"


_PUT = re.compile(rb"put \d+ \d+ \d+ (\d+)\r\n")


def is_one_command(data: bytes) -> bool:
    """Whether a server reads this at once, as one command, and is back at the beginning of a line then."""
    if len(data) > 200 or not data.endswith(b"\r\n"):
        return False
    put = _PUT.match(data)
    return len(data) == put.end() + int(put[1]) + 2 if put else data.count(b"\n") == 1


# -- driving ---------------------------------------------------------------------------------------------------------


class Side:
    """One server and the harness's connections to it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.control = server.connect()
        self.control.settimeout(PATIENCE)
        self.connections: dict[int, socket.socket] = {}
        self.answers: dict[int, bytes] = {}
        self.ended: set[int] = set()

    def open(self, number: int) -> None:
        made = self.server.connect()
        made.setblocking(False)
        self.connections[number] = made
        self.answers[number] = b""

    def shut(self, number: int) -> None:
        if number in self.connections:
            self.connections.pop(number).close()
        self.answers.pop(number, None)
        self.ended.discard(number)

    def half_close(self, number: int) -> None:
        if number in self.connections:
            with contextlib.suppress(OSError):
                self.connections[number].shutdown(socket.SHUT_WR)

    def send(self, number: int, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self.connections[number].sendall(data)

    def wait(self, rounds: int) -> None:
        """Wait until what was sent has been answered, if it is no more than so many commands.

        In each round a server does at least one command of each connection.
        """
        self.ask(b"?\r\n" * rounds, rounds)  # an unknown command: it is counted nowhere
        self.read()

    def stats(self) -> bytes:
        """What ``stats`` says; one round more."""
        self.control.sendall(b"stats\r\n")
        self.server.turn()
        said = b""
        while not said.endswith(b"\n\r\n"):
            said += self._receive()
        self.read()
        return masked(said)

    def read(self) -> None:
        """Take what has been answered."""
        for number, connection in self.connections.items():
            self._read(number, connection)

    def _read(self, number: int, connection: socket.socket) -> None:
        if number in self.ended:
            return
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    data = connection.recv(65536)
                except ConnectionError:
                    data = b""
                if not data:
                    self.ended.add(number)
                    self.answers[number] += b"(closed)"
                    return
                self.answers[number] += data

    def ask(self, data: bytes, lines: int) -> bytes:
        """So many lines that these commands are answered with, on the connection of the harness."""
        self.control.sendall(data)
        said = b""
        while said.count(b"\r\n") < lines:
            self.server.turn()
            said += self._receive()
        return said

    def _receive(self) -> bytes:
        data = self.control.recv(65536)
        if not data:
            raise ConnectionResetError(f"{self.server.name} has closed the connection of the harness")
        return data

    def close(self) -> None:
        for number in list(self.connections):
            self.shut(number)
        self.control.close()


@dataclass
class Pair:
    """Two servers that are told the same. The first is the one that the other is held against."""

    first: Server
    second: Server
    now_ns: int = 0
    base: int = 0
    """The last id that was used up before this sequence."""
    sent: int = 0
    strict: bool = False
    """Nothing is let pass, and several may wait for the same jobs: for showing ``DIFFERENCES``."""
    seen: Counter[bytes] = field(default_factory=Counter)
    """What was answered, by its first word."""
    sides: tuple[Side, Side] = field(init=False)
    _stops: int = 0
    _waiter: int | None = None
    _own: dict[int, bytes] = field(default_factory=dict)
    _torn: set[int] = field(default_factory=set)
    """Connections whose bytes are not, or no longer, one command a step."""
    _behind: dict[int, int] = field(default_factory=dict)
    """How many commands those that wait have been sent beyond the one that they wait for, at most."""
    _was_warned: bool = False
    _has_ties: bool = False
    """Whether a connection may have reserved two jobs at one instant: either of them may run out first."""
    _apart: bool = False
    _lists_tubes: bool = False

    def __post_init__(self) -> None:
        self.sides = (Side(self.first), Side(self.second))

    # -- one sequence

    def run(self, steps: Sequence[Step], *, clean: bool = True) -> Difference | None:
        """Do these steps on both; the first difference, if there is one. Leaves no job and no connection behind, unless
        it is told not to ``clean``.
        """
        self._waiter, self._stops = None, 0
        self._behind.clear()
        self._was_warned = self._has_ties = False
        self._own, self._torn = {}, set()
        self._apart = are_apart(steps)
        difference: Difference | None = None
        for index, step in enumerate(steps):
            difference = self._do(index, step)
            if difference is not None:
                return difference
        return self._clean(len(steps)) if clean else None

    def _do(self, index: int, step: Step) -> Difference | None:
        self._pass((self.now_ns // GRID + 1) * GRID)
        if isinstance(step, Send) and self._behind and len(step.parts) > 1 and step.connection not in self._behind:
            return self._one_by_one(index, step)
        if isinstance(step, Move):
            until = self.now_ns + round(step.seconds * SECOND)
            while self.now_ns < until:
                self._pass(until, stop=True)
                if difference := self._compare(index):
                    return difference
            return None
        rounds = 0
        if isinstance(step, Send):
            self.sent += len(step.parts)
            data = self._filled_in(step)
            if data.count(b"reserve") > 1 or (b"reserve" in data and step.connection in self._behind):
                self._has_ties = True
            self._lists_tubes = b"list-tubes\r\n" in data or bool(self._behind)
            if step.connection in self._torn or step.connection == self._waiter or not is_one_command(data):
                self._torn.add(step.connection)
                rounds = data.count(b"\n") + 1 + len(data) // 100
                if self._waiter is not None and (self._apart or step.connection == self._waiter):
                    self._behind[step.connection] = self._behind.get(step.connection, 0) + rounds
            elif step.parts == (b"stats\r\n",):
                rounds = 1  # or that of the harness may be counted in it
        elif isinstance(step, Open | Close):
            rounds = 2
        for side in self.sides:
            self._do_on(side, step)
        if isinstance(step, Send) and b"pause-tube" in b"".join(step.parts):  # the end of a pause is such a thing
            self._settle(rounds)
            self._stop_here()
        return self._compare(index, step, rounds)

    def _one_by_one(self, index: int, step: Send) -> Difference | None:
        """The same, one command after the other: of the commands of several connections, any may come first."""
        for part in step.parts:
            if difference := self._do(index, Send(step.connection, (part,))):
                return difference
        return None

    def _do_on(self, side: Side, step: Step) -> None:
        if isinstance(step, Open):
            self._shut(side, step.connection)
            side.open(step.connection)
        elif isinstance(step, Close) and step.half:
            side.half_close(step.connection)
        elif isinstance(step, Close):
            self._shut(side, step.connection)
        elif isinstance(step, Drain):
            side.server.drain()
        elif isinstance(step, Send) and step.connection in side.connections and not self._would_race(step):
            side.send(step.connection, self._filled_in(step))

    def _shut(self, side: Side, number: int) -> None:
        """Close a connection. Whether commands that are still unread are done then depends on the kind of socket and on
        the moment: they are done before.
        """
        if number in self._behind:
            side.half_close(number)
            side.wait(2 + self._behind[number])
        side.shut(number)

    def _would_race(self, step: Send) -> bool:
        """Whether this could make a second connection wait for the same jobs, or do something at a time unknown."""
        if self.strict:
            return False
        whole = b"".join(step.parts)
        is_waiting = step.connection == self._waiter or (self._apart and self._waiter is not None)
        if b"reserve" in whole and not self._apart and not is_waiting and self._waiter is not None:
            return True
        if is_waiting and (b"pause-tube" in whole or b"stats" in whole):  # times would differ by what rule 4 says
            return True
        return bool(self._behind) and step.connection not in self._behind and not is_one_command(self._filled_in(step))

    def _filled_in(self, step: Send) -> bytes:
        whole = b"".join(step.parts)
        if b"<" not in whole:
            return whole
        whole = whole.replace(b"<own>", self._own.get(step.connection, b"1"))
        return re.sub(rb"<(\d+)>", lambda found: b"%d" % (self.base + int(found[1])), whole)

    # -- time

    def _pass(self, until_ns: int, *, stop: bool = False) -> None:
        """Go on to a time by way of all that falls due until then; ``stop``: to the first of these only."""
        while (due := self._next_due()) is not None and due < until_ns:
            self.now_ns = max(due, self.now_ns)
            self._stop_here()
            if stop:
                return
        self.now_ns = until_ns
        for side in self.sides:
            side.server.go_to(until_ns, 0)
        if stop:
            self._settle(0)

    def _stop_here(self) -> None:
        """Let happen what is due now. beanstalkd notices after a first command, and has acted before a second one."""
        self._stops += 1
        for side in self.sides:
            side.server.go_to(self.now_ns, self._stops * LAG)
        self._settle(0)

    def _next_due(self) -> int | None:
        dues = [due for side in self.sides if (due := side.server.next_due()) is not None]
        return min(dues, default=None)

    def _settle(self, rounds: int) -> list[bytes]:
        """Wait until all that was sent is done, and what came in for whoever was waiting; what ``stats`` says then."""
        if rounds or self._behind:
            for side in self.sides:
                side.wait(max(rounds, 1))
        if any(side.answers.get(number) for side in self.sides for number in self._behind):
            for side in self.sides:
                side.wait(sum(self._behind.values()))
        return [side.stats() for side in self.sides]

    # -- comparing

    def _compare(self, index: int, step: Step | None = None, rounds: int = 0) -> Difference | None:
        for more in (0, 4, 16, 64):  # what is on its way is no difference
            said = self._settle(rounds + more)
            if (difference := self._difference(index, said)) is None:
                break
        self._note(said[0], step)
        for side in self.sides:
            for number in side.answers:
                side.answers[number] = b""
        return difference

    def _difference(self, index: int, said: list[bytes]) -> Difference | None:
        first, second = self.sides
        for number, expected in first.answers.items():
            answer = second.answers.get(number, b"")
            if expected != answer and self._comparable(expected) != self._comparable(answer):
                difference = self._make(index, f"connection {number}", expected, answer)
                if not self.strict and self._has_ties and b"RESERVED " in expected and b"RESERVED " in answer:
                    difference.known = "two jobs that run out at one instant"
                return difference
        if said[0] != said[1]:
            difference = self._make(index, "stats", *said)
            if not self.strict and self._was_warned and _timeouts(said[0]) < _timeouts(said[1]):
                difference.known = "a job that does not run out"
            return difference
        return None

    def _comparable(self, answer: bytes) -> bytes:
        """The answer, masked, and without what is different on purpose: ``DIFFERENCES``."""
        if self.strict:
            return masked(answer)
        if b"\nstate: invalid\n" in answer:
            answer = _HALF.sub(b"NOT_FOUND\r\n", answer)
        return masked(_TUBES.sub(_sort, answer) if self._lists_tubes else answer)

    def _make(self, index: int, where: str, expected: bytes, answer: bytes) -> Difference:
        return Difference(index, where, {self.first.name: masked(expected), self.second.name: masked(answer)})

    def _note(self, stats: bytes, step: Step | None) -> None:
        """Who waits now, and which job each connection reserved last."""
        if b"\ncurrent-waiting: 0\n" in stats:
            self._waiter = None
            self._behind.clear()
        elif self._waiter is None and isinstance(step, Send):
            self._waiter = step.connection
        for number, answer in self.sides[0].answers.items():
            if answer:
                self.seen.update(_WORD.findall(answer))
                self._was_warned = self._was_warned or b"DEADLINE_SOON" in answer
            if b"RESERVED " in answer and (found := re.findall(rb"^RESERVED (\d+) ", answer, re.MULTILINE)):
                self._own[number] = found[-1]

    # -- between sequences

    def kill(self) -> int:
        """End both as kill -9 does, and start them again on what they left; the newest id that was used."""
        newest = max(int(side.ask(b"put 0 0 1 0\r\n\r\n", 1).split()[1]) for side in self.sides)
        for side in self.sides:
            side.close()
            side.server.kill()
        self.sides = (Side(self.first), Side(self.second))
        return newest

    def _clean(self, index: int) -> Difference | None:
        """Close all connections, end all pauses, delete all jobs, and see that both are empty."""
        for side in self.sides:
            for number in list(side.connections):  # one by one: what one gives back, the next may be waiting for
                if number != KEEPER:
                    self._shut(side, number)
                    side.wait(2 + sum(self._behind.values()))
        ends = b"".join(b"pause-tube %b 0\r\n" % name.encode() for name in TUBES)
        ended = [side.ask(ends, len(TUBES)) for side in self.sides]
        if ended[0] != ended[1]:
            return self._make(index, "pauses ended", *ended)
        self._stop_here()
        self._pass(self.now_ns + GRID)
        for side in self.sides:
            side.shut(KEEPER)
        news = [side.ask(b"put 0 0 1 0\r\n\r\n", 1)[: -len(b"\r\n")] for side in self.sides]
        if news[0] != news[1]:
            return self._make(index, "a put at the end", *news)
        newest = int(news[0].split()[1])
        deletes = b"".join(b"delete %d\r\n" % number for number in range(self.base + 1, newest + 1))
        gone = [side.ask(deletes, newest - self.base) for side in self.sides]
        if gone[0] != gone[1]:
            return self._make(index, f"delete {self.base + 1} to {newest}", *gone)
        self.base = newest
        self._pass(self.now_ns + GRID)
        return self._compare(index)

    def has_crashed(self) -> bool:
        """Whether the real one has: it does, now and then."""
        return isinstance(self.first, Beanstalkd) and self.first.has_crashed()

    def close(self) -> None:
        """Both, and all connections to them."""
        for side in self.sides:
            side.close()
            side.server.close()


def compare(make: Callable[[], Pair], steps: Sequence[Step], *, strict: bool = False) -> Difference | None:
    """What ``Pair.run`` finds, on servers of their own."""
    pair = make()
    pair.strict = strict
    try:
        return pair.run(steps)
    finally:
        pair.close()
