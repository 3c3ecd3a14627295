"""Rounds: a process works on a queue until it is ended, another one reads what is left, and the two are compared.

What is counted, over all rounds:

    acknowledged   puts that had returned
    lost           of these: neither taken out and done before, nor there afterwards
    in hand        of the lost: the one that had been handed out and was not done when the end came. Where a library
                   knows no acknowledgement that is how it works
    holes          of the lost: those in front of an item that is there
    again          items that were done, and come again
    twice          items that come twice in one reading
    phantom        items that were never put, or not with these bytes
    disorder       items that come after one with a higher number
    unreadable     rounds after which the queue could not be opened, or not read to its end
    hung           rounds after which a process was still busy with that after 20 seconds
    marked rounds  rounds with anything of that but "again", and but "in hand" where there is no acknowledgement

What is said in the moment of a power cut may have happened or not, and counts as neither.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NoReturn
from zlib import crc32

from bench.crash.ends import End
from bench.crash.peers import Peer

PATIENCE = 20.0
READY, PUT, TAKING, TAKEN, FINISHING, DONE = b"R", b"P", b"T", b"G", b"F", b"D"
ITEM, BAD, GOOD, ERROR = b"I", b"B", b"E", b"X"
_MESSAGE = struct.Struct("<cQ")
_NUMBER = struct.Struct("<Q")
_SIZES = (0, 10, 100, 100, 1000, 5000)


def payload(number: int, choose: random.Random) -> bytes:
    """An item: its number, bytes, and a checksum of both."""
    data = _NUMBER.pack(number) + choose.randbytes(choose.choice(_SIZES))
    return data + crc32(data).to_bytes(4, "little")


def number_of(data: bytes) -> int | None:
    """The number of an item that is whole; ``None`` for any other."""
    if len(data) < 12 or crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
        return None
    number: int = _NUMBER.unpack_from(data)[0]
    return number


class Child:
    """A forked process and the pipe on which it talks."""

    def __init__(self, work: Callable[[Callable[[bytes, int], None]], object]) -> None:
        self._pipe, other = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _be_child(other, work)
        os.close(other)
        self._rest = b""
        self.ended = False

    def hear(self, seconds: float) -> list[tuple[bytes, int]]:
        """What it has said, after a wait for something to be said; sets ``ended`` when it will say no more."""
        if not select.select([self._pipe], [], [], max(seconds, 0))[0]:
            return []
        data = os.read(self._pipe, 1 << 16)
        self.ended = not data
        data = self._rest + data
        whole = len(data) - len(data) % _MESSAGE.size
        self._rest = data[whole:]
        return list(_MESSAGE.iter_unpack(data[:whole]))

    def hear_all(self, seconds: float) -> list[tuple[bytes, int]]:
        """Everything it says until it ends, or the time is over."""
        heard, deadline = [], time.monotonic() + seconds
        while not self.ended and (left := deadline - time.monotonic()) > 0:
            heard += self.hear(left)
        return heard

    def bury(self) -> None:
        """It has been killed, or is now."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._pipe)


def _be_child(pipe: int, work: Callable[[Callable[[bytes, int], None]], object]) -> NoReturn:
    silence = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):
        os.dup2(silence, number)

    def tell(kind: bytes, number: int) -> None:
        os.write(pipe, _MESSAGE.pack(kind, number))

    try:
        work(tell)
    except BaseException:
        tell(ERROR, 0)
    finally:
        os._exit(0)


# -- the processes ---------------------------------------------------------------------------------------------------


def labour(peer: type[Peer], folder: Path, first: int, seed: int, tell: Callable[[bytes, int], None]) -> NoReturn:
    """Put items numbered from ``first`` on, take some out, until the end comes."""
    choose = random.Random(seed)
    queue = peer(folder)
    tell(READY, 0)
    share = choose.choice((0.55, 0.7, 0.9))
    in_hand: int | None = None
    while True:
        if choose.random() < share:
            queue.put(payload(first, choose))
            tell(PUT, first)
            first += 1
        elif in_hand is not None:
            tell(FINISHING, in_hand)
            queue.done()
            tell(DONE, in_hand)
            in_hand = None
        else:
            tell(TAKING, 0)
            data = queue.take()
            if data is not None:
                in_hand = number_of(data) or 0
                tell(TAKEN if in_hand else BAD, in_hand)


def read_out(peer: type[Peer], folder: Path, tell: Callable[[bytes, int], None]) -> None:
    """Open what is left, read everything, close."""
    queue = peer(folder)
    while (data := queue.take()) is not None:
        number = number_of(data)
        tell(BAD if number is None else ITEM, number or 0)
        queue.done()
    queue.close()
    tell(GOOD, 0)


# -- rounds ----------------------------------------------------------------------------------------------------------


class Ledger:
    """What a queue has said, in the rounds since its folder was new."""

    def __init__(self) -> None:
        self.put: set[int] = set()
        self.tried: set[int] = set()
        """In flight when the end came: may be there or not."""
        self.done: set[int] = set()
        self.hand: set[int] = set()
        """Handed out and not done."""
        self.either: set[int] = set()
        """Being done, or taken or done in the moment of the end: may be there or not."""
        self.taking = False

    def hear(self, kind: bytes, number: int, counts: Counter[str]) -> None:
        if kind == PUT:
            self.put.add(number)
            counts["acknowledged"] += 1
        elif kind == TAKING:
            self.taking = True
        elif kind == TAKEN:
            self.taking = False
            self.hand.add(number)
            if number in self.done:
                counts["again"] += 1
            else:
                counts["phantom"] += number not in self.put and number not in self.tried
        elif kind == BAD:
            self.taking = False
            counts["phantom"] += 1
        elif kind == FINISHING:
            self.hand.discard(number)
            self.either.add(number)
        elif kind == DONE:
            self.either.discard(number)
            self.done.add(number)

    def hear_late(self, kind: bytes, number: int) -> None:
        """Said in the moment of a power cut."""
        if kind == PUT:
            self.tried.add(number)
        elif kind == TAKING:
            self.taking = True
        elif kind == TAKEN:
            self.hand.add(number)
        elif kind in (FINISHING, DONE):
            self.hand.discard(number)
            self.either.add(number)

    def compare(self, found: list[int], readable: bool, counts: Counter[str]) -> None:
        """After a round: what was found, and whether that was all that could be had."""
        there = set(found)
        lost = self.put - self.done - self.either - there
        counts["lost"] += len(lost)
        hand = lost & self.hand
        if not hand and self.taking and readable and lost:
            hand = {min(lost)}  # the take that was under way, of which nothing was said
        counts["in hand"] += len(hand)
        counts["holes"] += sum(number < max(there & self.put, default=0) for number in lost - hand)
        counts["again"] += len(there & self.done)
        counts["twice"] += len(found) - len(there)
        counts["phantom"] += len(there - self.put - self.tried - self.done - self.either)
        counts["disorder"] += sum(before > after for before, after in pairwise(found))
        self.done |= there | lost | self.either
        self.tried -= there
        self.put, self.hand, self.either, self.taking = set(), set(), set(), False


def run(peer: type[Peer], end: End, rounds: int, seed: int) -> Counter[str]:
    """So many rounds of one library, one way of ending; what was counted."""
    counts: Counter[str] = Counter(rounds=rounds)
    choose = random.Random(f"{seed} {peer.name}")
    ledger, first, folder = Ledger(), 1, end.folder / "round-0"
    for at in range(rounds):
        if not folder.exists():
            folder.mkdir()
            ledger = Ledger()
        end.settle()
        before = Counter(counts)
        first = _work(peer, folder, end, ledger, first, choose, counts)
        found, outcome = _read(peer, folder, counts)
        counts["unreadable"] += outcome == "unreadable"
        counts["hung"] += outcome == "hung"
        ledger.compare(found, outcome == "good", counts)
        grown = counts - before
        bad = grown["lost"] - (0 if peer.acknowledges else grown["in hand"])
        bad += sum(grown[name] for name in ("twice", "phantom", "disorder", "unreadable", "hung"))
        counts["marked rounds"] += bad > 0
        if outcome != "good":
            shutil.rmtree(folder, ignore_errors=True)
            folder = end.folder / f"round-{at + 1}"
    shutil.rmtree(folder, ignore_errors=True)
    return counts


def _work(
    peer: type[Peer], folder: Path, end: End, ledger: Ledger, first: int, choose: random.Random, counts: Counter[str]
) -> int:
    """One process works until the end comes; the next number to use."""
    seed = choose.randrange(1 << 30)
    worker = Child(lambda tell: labour(peer, folder, first, seed, tell))
    at_once = first > 1 and choose.random() < 0.1
    ready = False

    def listen(seconds: float) -> None:
        nonlocal ready
        deadline = time.monotonic() + seconds
        while True:
            for kind, number in worker.hear(min(deadline - time.monotonic(), 0.05)):
                ready = ready or kind == READY
                ledger.hear(kind, number, counts)
            if worker.ended or time.monotonic() >= deadline:
                return

    if at_once:
        listen(choose.random() * 0.01)
    else:
        deadline = time.monotonic() + PATIENCE
        while not (ready or worker.ended or time.monotonic() > deadline):
            listen(0.002)
        counts["hung"] += not (ready or worker.ended)
        listen(choose.random() * 0.08)
        if choose.random() < 0.5:
            end.write_back()
        listen(choose.random() * 0.08)
    while heard := worker.hear(0):
        for kind, number in heard:
            ledger.hear(kind, number, counts)
    if worker.ended:
        counts["stopped by itself"] += 1
    end.strike(worker.pid)
    for kind, number in worker.hear_all(PATIENCE):
        if end.is_sharp:
            ledger.hear(kind, number, counts)
        else:
            ledger.hear_late(kind, number)
    last = max(ledger.put | {number for number in ledger.tried if number >= first}, default=first - 1)
    worker.bury()
    ledger.tried.add(last + 1)
    return max(last, first) + 2


def _read(peer: type[Peer], folder: Path, counts: Counter[str]) -> tuple[list[int], str]:
    """A fresh process reads what is left: the numbers, in order, and whether it came to a good end."""
    reader = Child(lambda tell: read_out(peer, folder, tell))
    heard = reader.hear_all(PATIENCE)
    ended = reader.ended
    reader.bury()
    counts["phantom"] += sum(kind == BAD for kind, _ in heard)
    found = [number for kind, number in heard if kind == ITEM]
    if heard and heard[-1][0] == GOOD:
        return found, "good"
    return found, "unreadable" if ended else "hung"
