"""Members that own a shipped queue in turn, and what is done to them: killed, stopped, cut off, asked to hand over."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kestrelpy import scan
from kestrelpy.ship import Store, orphans, rejoin, verify
from tests.ship.in_store import items_of
from tests.ship.member import data_of
from tests.support.paths import PYTHONPATH
from tests.support.patience import PATIENCE

LEASE = 5.0


class Said(NamedTuple):
    """A line of a member: its words, and when it was said."""

    words: list[str]
    at: float


class Member:
    """A process of ``tests.ship.member``, with a folder of its own; it may be started again and again. ``lease``: 0 is
    none.
    """

    def __init__(
        self,
        folder: Path,
        url: str,
        acks: str,
        options: dict[str, Any],
        wrap: tuple[str, ...] = (),
        lease: float = LEASE,
    ) -> None:
        self.folder = folder
        self.name = folder.name
        self.said: list[Said] = []
        self._words = (str(folder), url, acks, json.dumps(options), str(lease), self.name)
        self._wrap, self._has_lease = wrap, lease > 0
        self.process: subprocess.Popen[str] | None = None

    def start(self, when: str = "later") -> None:
        with open(self.folder.parent / f"{self.name}.log", "a") as log:
            self.process = subprocess.Popen(
                [*self._wrap, sys.executable, "-m", "tests.ship.member", *self._words, when],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": PYTHONPATH},
            )
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                if line.endswith("\n"):
                    *words, at = line.split()
                    self.said.append(Said(words, float(at)))

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self._reader.join()

    def heard(self, word: str, after: float) -> float | None:
        """When it first said that, after a moment; ``None`` if it has not."""
        return next((each.at for each in list(self.said) if each.words[0] == word and each.at > after), None)

    def acknowledged(self) -> list[tuple[int, bytes, float]]:
        """Id, data and time of each put that has returned."""
        found, epoch = [], "0"
        for words, at in list(self.said):
            if words[0] == "owner":
                epoch = words[1]
            elif words[0] == "put":
                data = data_of(self.name, epoch, int(words[1]), has_lease=self._has_lease)
                found.append((int(words[2]), data, at))
        return found


class Failure(NamedTuple):
    """``at``: when it began. ``back``: the first put of the next owner."""

    kind: str
    at: float
    back: float


class Chain:
    """Members that share one queue. ``cut``: cuts the network of all members but the last one, or mends it."""

    def __init__(self, members: list[Member], cut: Callable[[bool], None] | None = None) -> None:
        self.members = members
        self.failures: list[Failure] = []
        self._cut = cut

    def start(self) -> None:
        first, *others = self.members
        first.start("first")
        self._until(partial(first.heard, "put", 0.0), "the first owner puts nothing")
        for member in others:
            member.start()
        for member in others:
            self._until(partial(member.heard, "standby", 0.0), f"{member.name} does not follow")

    def owner(self) -> Member:
        """The member that was the last one to become the owner."""
        latest = {
            member.name: max((each.at for each in member.said if each.words[0] == "owner"), default=0)
            for member in self.members
        }
        return max(self.members, key=lambda member: latest[member.name])

    def wait_for_puts(self, count: int) -> None:
        """Wait until the owner has put so many more."""
        owner = self.owner()
        due = len(owner.acknowledged()) + count
        self._until(lambda: len(owner.acknowledged()) >= due or None, f"{owner.name} does not put {count} items")

    def start_again(self, member: Member) -> None:
        """Kill a member that follows, and wait until its next process has come to the end of the log."""
        member.kill()
        at = time.monotonic()
        member.start()
        self._until(lambda: member.heard("follows", at), f"{member.name} does not come to the end of the log")

    def fail(self, kind: str) -> None:
        """One failure of the owner, until another one puts, and the old one follows. ``"kill, and tell"``: it is
        killed, and one of the others is told to take the queue over at once.
        """
        old, at = self.owner(), time.monotonic()
        if kind.startswith("kill"):
            old.kill()
        if kind == "kill, and tell":
            next(each for each in self.members if each is not old).signal(signal.SIGUSR2)
        elif kind == "stop":
            old.signal(signal.SIGSTOP)
        elif kind == "cut":
            assert self._cut is not None
            self._cut(True)
        elif kind == "hand over":
            old.signal(signal.SIGUSR1)
        back = self._until(lambda: self._next_put(old, at), f"nobody has taken over after '{kind}'")
        self.failures.append(Failure(kind, at, back))
        if kind.startswith("kill"):
            old.start()
        elif kind == "stop":
            old.signal(signal.SIGCONT)
        elif kind == "cut":
            assert self._cut is not None
            self._cut(False)
        self._until(lambda: old.heard("standby", at), f"the old owner does not follow after '{kind}'")

    def _next_put(self, old: Member, at: float) -> float | None:
        others = [member for member in self.members if member is not old]
        for member in others:
            became = member.heard("owner", at)
            if became is not None:
                return member.heard("put", became)
        return None

    def _until(self, condition: Callable[[], float | None], what: str) -> float:
        until = time.monotonic() + 3 * PATIENCE
        while time.monotonic() < until:
            found = condition()
            if found:
                return found
            time.sleep(0.01)
        logs = [(member.folder.parent / f"{member.name}.log").read_text()[-2000:] for member in self.members]
        raise AssertionError(
            "\n".join([what, *(f"{m.name}: {[s.words for s in m.said[-5:]]}" for m in self.members), *logs])
        )

    def finish(self) -> None:
        """End the others, and let the owner ship what it has."""
        owner, at = self.owner(), time.monotonic()
        for member in self.members:
            if member is not owner:
                member.kill()
        owner.signal(signal.SIGUSR1)
        self._until(lambda: owner.heard("handed-over", at), "the last owner does not hand over")

    def end(self) -> None:
        """Leave no process behind."""
        for member in self.members:
            member.kill()

    # -- what must hold ----------------------------------------------------------------------------------------------

    def check(self, store: Store, acks: str) -> int:
        """Compare what was acknowledged with the log and with what was set aside. Returns how many puts were set aside.
        The members have ended.
        """
        for member in self.members:
            rejoin(member.folder, "jobs", store)  # the end may have cut one short
        logged, aside = items_of(store), self._set_aside()
        acknowledged = [each for member in self.members for each in member.acknowledged()]
        ids = [item_id for item_id, _, _ in acknowledged]
        assert len(set(ids)) == len(ids), "an id was given out twice"
        datas = list(logged.values())
        assert len(set(datas)) == len(datas), "an item is in the log twice"
        assert not aside.keys() & logged.keys(), "an id was given out twice, or what was set aside was merged"
        assert verify(store, "jobs").ok
        lost = [each for each in acknowledged if logged.get(each[0]) != each[1]]
        if acks == "shipped":
            assert not lost, f"acknowledged as shipped, and not in the log: {lost[:5]}"
            return 0
        for item_id, data, _ in lost:
            assert aside.get(item_id) == data, f"item {item_id} is neither in the log nor set aside"
        for failure in self.failures:
            mine = [
                at for _, _, at in lost if failure.at - 60 < at <= failure.back + 60 and self._nearest(at) is failure
            ]
            if mine:
                assert max(mine) - min(mine) <= LEASE + 2, f"{failure}: lost from {min(mine)} to {max(mine)}"
        return len(lost)

    def _nearest(self, at: float) -> Failure:
        return min(self.failures, key=lambda each: abs(each.at - at))

    def _set_aside(self) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        for member in self.members:
            for each in orphans(member.folder, "jobs"):
                for record in scan(each.path, "jobs", start_id=each.first_id):
                    assert record.id not in found or found[record.id] == record.data
                    found[record.id] = record.data
        return found


class Link:
    """A network of one's own for a process: a pair of virtual interfaces, which can be taken down. Needs root.

    Raises ``FileExistsError`` if there is one with this number: of another test, or of one that was killed, or for a
    moment of one that has ended.
    """

    def __init__(self, number: int, port: int) -> None:
        self._name = f"kestrel{number}"
        self._outside, self._inside = f"kst{number}o", f"kst{number}i"
        self.host = f"10.203.{number}.1"
        self._port = port
        ip("netns", "add", self._name)
        try:
            self._set_up(number)
        except BaseException:
            self._remove()
            raise
        threading.Thread(target=self._accept, daemon=True).start()

    def _set_up(self, number: int) -> None:
        ip("link", "add", self._outside, "type", "veth", "peer", "name", self._inside, "netns", self._name)
        ip("addr", "add", f"{self.host}/30", "dev", self._outside)
        ip("link", "set", self._outside, "up")
        for words in (
            ("addr", "add", f"10.203.{number}.2/30", "dev", self._inside),
            ("link", "set", self._inside, "up"),
        ):
            ip("-n", self._name, *words)
        self._listener = socket.create_server((self.host, 0))

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self._listener.getsockname()[1]}"

    @property
    def wrap(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self._name)

    def cut(self, is_cut: bool) -> None:
        ip("link", "set", self._outside, "down" if is_cut else "up")

    def close(self) -> None:
        self._listener.close()
        self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("netns", "del", self._name)

    def _accept(self) -> None:
        while True:
            try:
                inside, _ = self._listener.accept()
            except OSError:
                return
            try:
                outside = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                inside.close()
                continue
            for one, other in ((inside, outside), (outside, inside)):
                threading.Thread(target=_carry, args=(one, other), daemon=True).start()


def _carry(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for each in (source, target):  # the thread that carries the other way finds that out, and does the same
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, check=False)
    if b"File exists" in done.stderr:
        raise FileExistsError(" ".join(words))
    done.check_returncode()


@contextlib.contextmanager
def linked(port: int) -> Iterator[Link]:
    """A link with the first number that is free."""
    link = _first_free(port)
    try:
        yield link
    finally:
        link.close()


def _first_free(port: int) -> Link:
    for number in range(1, 255):
        with contextlib.suppress(FileExistsError):
            return Link(number, port)
    raise AssertionError("runs that were killed have left 254 networks: ip netns del")
