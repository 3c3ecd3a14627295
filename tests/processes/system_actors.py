"""The processes that are killed: a writer with readers of its own, a reader elsewhere, and one that tells what is left.

Each is forked off a small process with one thread, that has nothing open, and talks through a pipe in messages of one
size. Choices come from a seed; how threads and processes interleave does not.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from typing import Any, NamedTuple, NoReturn

from kestrelpy import Item, JournaledQueue, QueueEmpty, Reader, open_reader, scan
from tests.processes.system_ledger import Identity, Kept, identify, payload

MESSAGE = Struct("<cBQIIHIHHQ")
"""Kind, whose, an item's id, a number, its identity, and when it was said: ``time.monotonic_ns``."""
(READY, PUT, DURABLE, DELIVERED, COMMITS, ABORTS, SAVED, SAVED_DURABLY, RECORD, LEFT, END, DONE, FAILED) = (
    b"R", b"P", b"D", b"G", b"C", b"A", b"S", b"U", b"V", b"X", b"Z", b"F", b"E",
)  # fmt: skip
NOBODY = Identity(0, 0, 0, 0, 0)
MOST_AT_ONCE = 4096 // MESSAGE.size
"""Messages in one write, so that those of several threads never mix."""
PATIENCE = 20.0
"""Seconds after which what must happen is taken not to happen."""
QUEUE = "jobs"
Plant = Callable[[], object]


class Message(NamedTuple):
    """What a process says, as it is heard."""

    kind: bytes
    who: int
    item_id: int
    number: int
    identity: Identity
    said_at: int


def pack(kind: bytes, who: int = 0, item_id: int = 0, number: int = 0, identity: Identity = NOBODY) -> bytes:
    return MESSAGE.pack(kind, who, item_id, number, *identity, time.monotonic_ns())


@dataclass(frozen=True)
class Life:
    """What a writer is to do."""

    folder: str
    archive: str | None
    generation: int
    seed: int
    sync: Any
    segment_bytes: int
    inside: tuple[str, ...]
    producers: int
    puts: int
    """How many items it may put in all, so that what is unread stays small."""


def open_queue(life: Life, checkpoint_interval: float = 0.02) -> JournaledQueue:
    return JournaledQueue(
        life.folder,
        QUEUE,
        sync=life.sync,
        segment_bytes=life.segment_bytes,
        archive_dir=life.archive,
        checkpoint_interval=checkpoint_interval,
    )


class Voice:
    """The writing end of a pipe."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def tell(self, kind: bytes, who: int = 0, item_id: int = 0, number: int = 0, identity: Identity = NOBODY) -> None:
        os.write(self._pipe, pack(kind, who, item_id, number, identity))

    def tell_all(self, messages: list[bytes]) -> None:
        for at in range(0, len(messages), MOST_AT_ONCE):
            os.write(self._pipe, b"".join(messages[at : at + MOST_AT_ONCE]))


class Actor:
    """A forked process that does ``work(voice)``, and what it says. ``plant`` spoils the library in it, before."""

    def __init__(self, work: Callable[[Voice], object], plant: Plant | None = None) -> None:
        self.pipe, other = os.pipe()
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the actor
        self._rest = b""
        self.status: int | None = None
        self.failed_at = 0
        self.pid = os.fork()
        if self.pid == 0:
            self._live(work, plant, Voice(other))
        os.close(other)

    def _live(self, work: Callable[[Voice], object], plant: Plant | None, voice: Voice) -> NoReturn:
        status = 1
        os.dup2(self._words.fileno(), 2)
        threading.excepthook = lambda _: self._fail(voice)
        try:
            os.close(self.pipe)
            if plant is not None:
                plant()
            work(voice)
            status = 0
        except BaseException:
            self._fail(voice)
        finally:
            os._exit(status)

    def _fail(self, voice: Voice) -> NoReturn:
        """In the child, on any of its threads."""
        with contextlib.suppress(OSError):
            voice.tell(FAILED)
        traceback.print_exc()
        os._exit(1)

    def hear(self) -> list[Message] | None:
        """What one read of the pipe brings; ``None`` at its end."""
        data = os.read(self.pipe, 1 << 16)
        if not data:
            return None
        data = self._rest + data
        whole = len(data) - len(data) % MESSAGE.size
        self._rest = data[whole:]
        messages = []
        for kind, who, item_id, number, *identity, said_at in MESSAGE.iter_unpack(data[:whole]):
            if kind == FAILED:
                self.failed_at = said_at
            else:
                messages.append(Message(kind, who, item_id, number, Identity(*identity), said_at))
        return messages

    def kill(self) -> None:
        """SIGKILL; its pipe may still be heard out."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.status = os.waitpid(self.pid, 0)[1]

    def is_gone(self) -> bool:
        """Whether it ended by itself."""
        if self.status is None and os.waitpid(self.pid, os.WNOHANG)[0]:
            self.status = 0
        return self.status is not None

    def wait(self) -> int:
        """Its exit status, when it has ended by itself."""
        if self.status is None:
            self.status = os.waitpid(self.pid, 0)[1]
        return self.status

    def words(self) -> str:
        """What it wrote to its standard error: why it failed, and what the library warned of."""
        self._words.seek(0)
        return self._words.read().decode(errors="replace")

    def close(self) -> None:
        self.kill()
        os.close(self.pipe)
        self._words.close()


# -- the writer ------------------------------------------------------------------------------------------------------


class Producer:
    """One thread's puts."""

    def __init__(self, queue: JournaledQueue, life: Life, thread: int, voice: Voice) -> None:
        self._queue, self._life, self._thread, self._voice = queue, life, thread, voice
        self._choose = random.Random(life.seed * 31 + thread)
        self._sequence = 0
        self._left = life.puts // (life.producers + 1)

    def put(self, count: int = 1) -> bool:
        """Put and say so; false if it has put enough."""
        if self._left < count:
            return False
        self._left -= count
        self._sequence += 1
        identity = Identity(self._life.generation, self._thread, self._sequence, 0, count)
        items = [payload(identity._replace(index=index), self._choose) for index in range(count)]
        first_id = self._queue.put(items[0]) if count == 1 else self._queue.put_many(items)[0]
        self._voice.tell(PUT, 0, first_id, 0, identity)
        return True

    def put_all(self) -> None:
        """On a thread of its own."""
        while self.put(self._choose.choice((1, 1, 1, 3))):
            if self._choose.random() < 0.2:
                time.sleep(0.0005)


class Consumer:
    """Reads of one reader, by one thread: some committed at once, some later, some aborted."""

    def __init__(self, reader: Reader, who: int, choose: random.Random, voice: Voice) -> None:
        self.reader, self._who, self._choose, self._voice = reader, who, choose, voice
        self._held: list[Item] = []

    def consume(self, timeout: float) -> None:
        choose, who = self._choose, self._who
        try:
            items = self.reader.get_many(choose.randrange(1, 12), timeout=timeout)
        except QueueEmpty:
            items = []
        told = [pack(DELIVERED, who, item.id, item.error_count, identify(item.data)) for item in items]
        self._voice.tell_all(told)
        for item in items:
            if choose.random() < 0.1:
                self._voice.tell(ABORTS, who, item.id)
                self.reader.abort(item)
            else:
                self._held.append(item)
        choose.shuffle(self._held)
        keep = choose.choice((0, 0, 0, 1, 3))
        done, self._held = self._held[keep:], self._held[:keep]
        self._voice.tell_all([pack(COMMITS, who, item.id) for item in done])
        if choose.random() < 0.5:
            self.reader.commit_many(done)
        else:
            for item in done:
                item.commit()
        if choose.random() < 0.15:
            durable = choose.random() < 0.4
            self.reader.checkpoint(durable)
            self.tell_saved(durable)

    def tell_saved(self, durable: bool) -> None:
        self._voice.tell(SAVED_DURABLY if durable else SAVED, self._who)


def write(life: Life, voice: Voice) -> NoReturn:
    """Put, get, commit, abort, save, sync; until it is killed."""
    choose = random.Random(life.seed)
    queue = open_queue(life)
    consumers = [Consumer(queue.reader(name), who, choose, voice) for who, name in enumerate(life.inside)]
    voice.tell(READY)
    own = Producer(queue, life, 0, voice)
    for thread in range(1, life.producers + 1):
        threading.Thread(target=Producer(queue, life, thread, voice).put_all, daemon=True).start()
    while True:
        action = choose.random()
        if action < 0.4:
            busy = own.put()
        elif action < 0.5:
            busy = own.put(choose.randrange(2, 6))
        elif action < 0.93:
            choose.choice(consumers).consume(0)
            busy = True
        elif action < 0.96:
            durable = choose.random() < 0.5
            queue.checkpoint(durable)
            for consumer in consumers:
                consumer.tell_saved(durable)
            busy = True
        else:
            _sync(queue, life, voice)
            busy = True
        if not busy:
            time.sleep(0.0002)


def _sync(queue: JournaledQueue, life: Life, voice: Voice) -> None:
    """See everything put so far on disk: by asking for it or, where that is promised, by waiting a little."""
    tail_id, begun = queue.stats().tail_id, time.monotonic()
    if isinstance(life.sync, float):
        while queue.stats().durable_id < tail_id:
            waited = time.monotonic() - begun
            assert waited < life.sync + PATIENCE, f"item {tail_id} is not on disk after {waited} seconds"
            time.sleep(0.001)
    else:
        queue.sync()
    voice.tell(DURABLE, 0, tail_id, int((time.monotonic() - begun) * 1000))


# -- the reader elsewhere --------------------------------------------------------------------------------------------


def read_elsewhere(folder: str, name: str, who: int, seed: int, voice: Voice) -> NoReturn:
    reader = open_reader(folder, QUEUE, name, poll_interval=0.002, create=True)
    voice.tell(READY, who)
    consumer = Consumer(reader, who, random.Random(seed), voice)
    while True:
        consumer.consume(0.02)


# -- what is left ----------------------------------------------------------------------------------------------------


def tell_what_is_left(life: Life, readers: dict[int, str], closes: bool, voice: Voice) -> None:
    """Open the queue, as any next process would, and tell every item there is and what each reader is delivered.

    ``readers``: their names by number, those that nobody else has open.
    """
    queue = open_queue(life, checkpoint_interval=3600)
    places = {who: queue.reader(name) for who, name in readers.items()}
    voice.tell(READY)
    last = queue._journal.segments[-1].last_id if queue._journal.segments else 0
    records = [
        pack(RECORD, 0, record.id, 0, identify(record.data))
        for record in scan(life.folder, QUEUE, archive_dir=life.archive)
    ]
    voice.tell_all(records)
    for who, reader in places.items():
        voice.tell_all([pack(LEFT, who, kept.id, kept.error_count, kept.identity) for kept in take(reader)])
        reader._check()
    queue._check()
    if closes:
        queue.close()
        voice.tell(DONE)
    live = next((record.id for record in scan(life.folder, QUEUE)), last + 1)
    voice.tell(END, 0, last, live)


def take(reader: Reader) -> list[Kept]:
    """Open reads of all there is; they come again."""
    taken: list[Kept] = []
    with contextlib.suppress(QueueEmpty):
        while True:
            taken += [Kept(i.id, identify(i.data), i.error_count) for i in reader.get_many(500, timeout=0)]
    return taken
