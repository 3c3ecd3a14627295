"""Sequences of commands for two servers at once: what a step is, how a seed makes them, how a failing one is shrunk.

Nothing here knows a server. A sequence is a list of steps; its ``repr`` is Python that makes it again.
In what is sent, ``<3>`` stands for the third id that the sequence uses up, ``<own>`` for the job that its connection
reserved last.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

MAX_JOB_BYTES = 60
"""What both servers are started with (``-z``): a job that is too big is then a cheap thing to send."""
TUBES = ("default", "a", "b-2", "c")
KEEPER = 9
"""The connection that keeps the tubes in being in some sequences. In the others only the tube that always is is paused:
the real one forgets a pause with its tube, ours does not (``DIFFERENCES``)."""
PRIORITIES = (0, 1, 5, 1023, 1024, 65536, 4294967295)


@dataclass(frozen=True)
class Send:
    """Bytes on a connection, in one piece: one command, part of one, or several."""

    connection: int
    parts: tuple[bytes, ...]


@dataclass(frozen=True)
class Open:
    """A new connection; what has this number is closed before."""

    connection: int


@dataclass(frozen=True)
class Close:
    """A connection that goes away; ``half``: it sends no more, and still reads."""

    connection: int
    half: bool = False


@dataclass(frozen=True)
class Move:
    """Time passes."""

    seconds: float


@dataclass(frozen=True)
class Drain:
    """SIGUSR1."""


Step = Send | Open | Close | Move | Drain


def as_text(steps: Sequence[Step]) -> str:
    """The sequence as Python."""
    return "[\n" + "".join(f"    {step!r},\n" for step in steps) + "]"


# -- making them -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flavour:
    """What a sequence is rich in. The numbers are weights of what comes next."""

    name: str
    weights: dict[str, float]
    connections: int = 3
    pipelined: float = 0.15
    torn: float = 0.03
    apart: bool = False
    """Every connection watches a tube of its own, so that several may wait at once."""


_ALL = {
    "put": 6.0,
    "take": 5.0,
    "wait": 1.5,
    "finish": 6.0,
    "any_id": 4.0,
    "tube": 2.0,
    "look": 3.0,
    "move": 2.0,
    "connection": 0.8,
    "pause": 0.6,
    "odd": 0.8,
}
FLAVOURS = (
    Flavour("all", _ALL),
    Flavour("time", _ALL | {"move": 6, "wait": 4, "odd": 0, "look": 2}),
    Flavour("pipelined", _ALL | {"move": 1}, pipelined=0.7, torn=0.1),
    Flavour("odd", _ALL | {"odd": 8, "look": 1, "move": 0.5}, connections=2, torn=0.15),
    Flavour("tubes", _ALL | {"tube": 8, "pause": 2.5, "connection": 2}, connections=4),
    Flavour("apart", _ALL | {"tube": 0, "wait": 6, "move": 4}, connections=5, apart=True),
)
_WHOLE = re.compile(rb"<|reserve")
"""What is sent in one piece: it is looked at when it is sent."""
TIMED = ("wait", "pause")
"""What answers or acts at a time: last in what is sent at once, or two things would be due at one instant."""


def sequence(seed: int, *, commands: int = 30) -> list[Step]:
    """The steps of a seed: always the same, some ``commands`` of them."""
    return _Maker(random.Random(seed)).steps(commands)


def to_itself(number: int) -> bytes:
    """What lets a connection wait for the jobs of a tube of its own."""
    return b"watch own-%d\r\nuse own-%d\r\nignore default\r\n" % (number, number)


def are_apart(steps: Sequence[Step]) -> bool:
    """Whether every connection has a tube of its own."""
    return all(
        following == Send(step.connection, (to_itself(step.connection),))
        for step, following in zip(steps, [*steps[1:], None], strict=True)
        if isinstance(step, Open) and step.connection != KEEPER
    )


class _Maker:
    """Draws the steps of one sequence."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._flavour = draw.choices(FLAVOURS, [4, 4, 2, 2, 2, 2])[0]
        self._ids = 0
        self._open = set(range(self._flavour.connections))
        self._rest: dict[int, bytes] = {}
        self._has_half_a_job = False
        self._keeps_tubes = draw.random() < 0.5

    def steps(self, commands: int) -> list[Step]:
        """The whole sequence."""
        steps: list[Step] = []
        if self._keeps_tubes:
            steps += [Open(KEEPER), Send(KEEPER, tuple(b"watch %b\r\n" % name.encode() for name in TUBES))]
        for number in range(self._flavour.connections):
            steps += self._opened(number)
        while commands > 0:
            made = self._step()
            commands -= len(made.parts) if isinstance(made, Send) else 1
            steps += self._opened(made.connection) if isinstance(made, Open) else [made]
        return steps

    def _opened(self, number: int) -> list[Step]:
        return [Open(number), *([Send(number, (to_itself(number),))] if self._flavour.apart else [])]

    def _step(self) -> Step:
        kind = self._kind()
        if kind == "move" and self._rest:  # half a job does not age in ours
            number = min(self._rest)
            return Send(number, (self._rest.pop(number),))
        if kind == "move":
            return Move(self._draw.choice((0.5, 0.5, 1.0, 1.0, 1.0, 1.5, 2.0, 3.0, 5.0)))
        if kind == "connection" or not self._open:
            return self._connection()
        number = self._draw.choice(sorted(self._open))
        if number in self._rest:
            return Send(number, (self._rest.pop(number),))
        parts = []
        while True:
            parts.append(self._command(kind, number))
            if kind in TIMED or len(parts) > 12 or self._draw.random() >= self._flavour.pipelined:
                break
            while (kind := self._kind()) in ("move", "connection"):
                pass
        sent = Send(number, tuple(parts))
        if self._draw.random() < self._flavour.torn and len(whole := b"".join(parts)) > 3 and not _WHOLE.search(whole):
            at = self._draw.randrange(1, len(whole) - 1)
            self._rest[number] = whole[at:]
            self._has_half_a_job = True
            return Send(number, (whole[:at],))
        return sent

    def _kind(self) -> str:
        weights = self._flavour.weights
        return self._draw.choices(list(weights), list(weights.values()))[0]

    def _connection(self) -> Step:
        number = self._draw.randrange(self._flavour.connections)
        self._rest.pop(number, None)
        if number not in self._open or self._draw.random() < 0.3:
            self._open.add(number)
            return Open(number)
        self._open.discard(number)
        return Close(number, half=self._draw.random() < 0.4)

    def _command(self, kind: str, number: int) -> bytes:
        made: bytes = getattr(self, f"_{kind}")(number)
        return made

    # each of these is one kind of command

    def _put(self, number: int) -> bytes:
        draw = self._draw
        body = draw.choice(
            (b"", b"a", b"job", b"x\r\ny", b"\0\r\0", b"delete 1\r\n", b"z" * draw.randrange(MAX_JOB_BYTES))
        )
        size = len(body)
        self._ids += 1
        if draw.random() < 0.05:
            if draw.random() < 0.5:
                body = b"b" * draw.randrange(MAX_JOB_BYTES + 1, MAX_JOB_BYTES * 8)
                size = len(body)
                self._ids -= 1
            else:
                size = max(0, size + draw.choice((-3, -2, -1, 1, 2, 5)))
                self._has_half_a_job = True
        delay = draw.choice((0, 0, 0, 0, 1, 2, 3, 10))
        ttr = draw.choice((0, 1, 2, 3, 3, 5, 10, 120))
        return b"put %d %d %d %d\r\n%b\r\n" % (draw.choice(PRIORITIES), delay, ttr, size, body)

    def _take(self, number: int) -> bytes:
        return self._draw.choice((b"reserve-with-timeout 0\r\n",) * 4 + (b"reserve-job %b\r\n" % self._id(),))

    def _wait(self, number: int) -> bytes:
        return self._draw.choice((b"reserve\r\n", b"reserve-with-timeout %d\r\n" % self._draw.choice((1, 1, 2, 3, 60))))

    def _finish(self, number: int) -> bytes:
        draw = self._draw
        verb = draw.choice((b"delete", b"release", b"release", b"bury", b"bury", b"touch"))
        rest = {
            b"release": b" %d %d" % (draw.choice(PRIORITIES), draw.choice((0, 0, 0, 1, 2, 5))),
            b"bury": b" %d" % draw.choice(PRIORITIES),
        }
        identifier = b"<own>" if draw.random() < 0.8 else self._id()
        return b"%b %b%b\r\n" % (verb, identifier, rest.get(verb, b""))

    def _any_id(self, number: int) -> bytes:
        verbs = (b"delete", b"stats-job", b"stats-job", b"kick-job", b"kick-job", b"peek")
        verb = self._draw.choice(verbs[:5] if self._has_half_a_job else verbs)  # the real one would show it
        return b"%b %b\r\n" % (verb, self._id())

    def _tube(self, number: int) -> bytes:
        return b"%b %b\r\n" % (self._draw.choice((b"use", b"use", b"watch", b"watch", b"ignore")), self._tube_name())

    def _look(self, number: int) -> bytes:
        draw = self._draw
        words = (
            b"peek-ready",
            b"peek-delayed",
            b"peek-buried",
            b"list-tubes",
            b"list-tube-used",
            b"list-tubes-watched",
        )
        if draw.random() < 0.3:
            return b"stats-tube %b\r\n" % self._tube_name()
        if draw.random() < 0.3:
            return b"kick %d\r\n" % draw.choice((1, 1, 2, 10))
        return draw.choice((*words, b"stats")) + b"\r\n"

    def _pause(self, number: int) -> bytes:
        name = self._tube_name() if self._keeps_tubes else b"default"
        return b"pause-tube %b %d\r\n" % (name, self._draw.choice((0, 0, 1, 2, 3, 60)))

    def _odd(self, number: int) -> bytes:
        if self._draw.random() < 0.2:
            return self._long(number)
        line = self._draw.choice(ODD_LINES)
        self._has_half_a_job |= line.startswith(b"put")
        return line.replace(b"#", self._id()) + b"\r\n"

    def _long(self, number: int) -> bytes:
        length = self._draw.choice((199, 200, 201, 210, 222, 223, 224, 225, 300, 447, 448, 449, 900))
        verb = self._draw.choice((b"use ", b"watch ", b"stats-tube ", b"nothing ", b"put 1 1 1 "))
        return verb + b"t" * max(0, length - len(verb) - self._draw.choice((0, 2))) + b"\r\n"

    def _id(self) -> bytes:
        newest = max(1, self._ids)
        return b"<%d>" % self._draw.randint(max(1, newest - 6), newest + self._draw.choice((0, 0, 0, 1)))

    def _tube_name(self) -> bytes:
        return self._draw.choice(TUBES).encode()


ODD_LINES = (
    b"",
    b" ",
    b"put",
    b"put ",
    b"put 1",
    b"put 1 1",
    b"put 1 1 1",
    b"put 1 1 1 ",
    b"put 1 1 1 1 1",
    b"put 1 1 1 1x",
    b"put -1 0 1 1",
    b"put 4294967296 0 1 1",
    b"put 1 4294967296 1 1",
    b"put 1 0 4294967296 1",
    b"put 1 0 1 4294967296",
    b"put  1  0  1  0",
    b"put 1\t0 1 0",
    b"put a b c d",
    b"PUT 1 0 1 0",
    b"reserve ",
    b"reserve 1",
    b"reserved",
    b"reserve-with-timeout",
    b"reserve-with-timeout ",
    b"reserve-with-timeout x",
    b"reserve-with-timeout 0x",
    b"reserve-with-timeout 0 0",
    b"reserve-with-timeout  0",
    b"reserve-with-timeout +0",
    b"reserve-with-timeout 99999999999999999999",
    b"reserve-job",
    b"reserve-job ",
    b"reserve-job x",
    b"reserve-job # ",
    b"reserve-job  #",
    b"delete",
    b"delete ",
    b"delete -1",
    b"delete 0",
    b"delete #x",
    b"delete # ",
    b"delete  #",
    b"delete 18446744073709551615",
    b"delete 18446744073709551616",
    b"delete 184467440737095516170",
    b"release",
    b"release #",
    b"release # 1",
    b"release # 1 0 0",
    b"release # 1 x",
    b"release # 4294967296 0",
    b"release # 1 4294967296",
    b"bury #",
    b"bury # x",
    b"bury # 1 1",
    b"bury # 4294967296",
    b"touch",
    b"touch ",
    b"touch x",
    b"touch # 1",
    b"peek",
    b"peek ",
    b"peek x",
    b"peek-ready ",
    b"peek-readyx",
    b"peek-delayed x",
    b"peek-buried x",
    b"peek-nothing",
    b"kick",
    b"kick ",
    b"kick x",
    b"kick 1x",
    b"kick  1",
    b"kick +1",
    b"kick 0",
    b"kick -1",
    b"kick 99999999999999999999",
    b"kick 4294967296",
    b"kick 4294967297",
    b"kick-job",
    b"kick-job ",
    b"kick-job x",
    b"kick-job # 1",
    b"stats ",
    b"statsx",
    b"stats-job",
    b"stats-job ",
    b"stats-job x",
    b"stats-job 0",
    b"stats-tube",
    b"stats-tube ",
    b"stats-tube -x",
    b"stats-tube no-such",
    b"stats-tube a b",
    b"use",
    b"use ",
    b"use -a",
    b"use a b",
    b"use a ",
    b"use  a",
    b"use a$b_c(d)/e;f.g+h",
    b"use a*b",
    b"use \xff",
    b"watch ",
    b"watch  a",
    b"watch a b",
    b"ignore ",
    b"ignore nothing",
    b"ignore a b",
    b"list-tubes ",
    b"list-tubesx",
    b"list-tube",
    b"list-tube-used ",
    b"list-tubes-watched x",
    b"pause-tube",
    b"pause-tube ",
    b"pause-tube a",
    b"pause-tube a x",
    b"pause-tube a 1 1",
    b"pause-tube -a 1",
    b"pause-tube no-such 1",
    b"pause-tube a* 1",
    b"pause-tube  a 4294967296",
    b"nothing",
    b"\0",
    b"stats\0",
    b"delete 1\0",
    b"\xc3\xa9",
    b"a\nb",
    b"\n",
    b"del\rete 1",
    b"quit ",
    b"quitfoo",
)
"""Lines at the edge of the grammar and beyond."""


# -- shrinking -------------------------------------------------------------------------------------------------------


def shrunk(steps: Sequence[Step], fails: Callable[[Sequence[Step]], bool], *, tries: int = 400) -> list[Step]:
    """A sequence that still fails, from which no step and no part of a step can be left out (within ``tries``)."""
    left = [tries]

    def still_fails(candidate: Sequence[Step]) -> bool:
        left[0] -= 1
        return left[0] >= 0 and fails(candidate)

    found = _without_needless(list(steps), still_fails)
    while left[0] > 0:
        before = list(found)
        for index, step in enumerate(before):
            if isinstance(step, Send) and len(step.parts) > 1:
                fails_with = partial(_fails_with, found, index, still_fails)
                found[index] = replace(step, parts=tuple(_without_needless(list(step.parts), fails_with)))
        found = _without_needless(found, still_fails)
        if found == before:
            break
    return found


def _fails_with(steps: list[Step], index: int, fails: Callable[[Sequence[Step]], bool], parts: Sequence[bytes]) -> bool:
    """Whether it still fails if this is all that one of its steps sends."""
    step = steps[index]
    assert isinstance(step, Send)
    return fails([*steps[:index], replace(step, parts=tuple(parts)), *steps[index + 1 :]])


def _without_needless(items: list[Any], fails: Callable[[list[Any]], bool]) -> list[Any]:
    """Leaves out ever smaller runs of items, as long as it still fails."""
    size = max(1, len(items) // 2)
    while True:
        at = 0
        while at < len(items):
            candidate = items[:at] + items[at + size :]
            if candidate and fails(candidate):
                items = candidate
            else:
                at += size
        if size == 1:
            return items
        size //= 2


def commands_of(steps: Iterable[Step]) -> int:
    """How many commands are sent in these."""
    return sum(len(step.parts) for step in steps if isinstance(step, Send))
