"""The figures of a kestrel server: the lines of ``stats`` and of ``dump_stats``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from kestrelpy._disk.real import memory_of_the_machine
from kestrelpy.server.figures import ServedJournal
from kestrelpy.server.kestrel.names import split

if TYPE_CHECKING:
    from kestrelpy import JournaledQueue
    from kestrelpy.server._connection import Connection
    from kestrelpy.server.kestrel.journal import SharedJournal
    from kestrelpy.server.kestrel.queue import ServedQueue
    from kestrelpy.server.kestrel.queues import Alias, Queues

__all__ = ["VERSION", "dump", "of_alias", "of_queue", "of_server", "served_journals"]

VERSION = "2.4.7+kestrelpy"
"""The version: it begins with that of the kestrel whose protocols these are, as clients may look at it."""


class Traffic(Protocol):
    """The part of the server that its figures are of."""

    monotonic: Callable[[], float]
    started_at: float
    connections: dict[Connection, None]
    connections_ever: int
    bytes_read: int
    bytes_written: int


def of_server(server: Traffic, queues: Queues) -> list[tuple[str, object]]:
    """The figures of the whole server, in kestrel's order."""
    all_queues = list(queues.by_name.values())
    memory = memory_of_the_machine()
    reserved = sum(queue.config.max_memory_size for queue in all_queues)
    return [
        ("uptime", int(server.monotonic() - server.started_at)),
        ("time", queues.clock.time_ns() // 1_000_000_000),
        ("version", VERSION),
        ("curr_items", sum(queue.items for queue in all_queues)),
        ("total_items", queues.total_items),
        ("bytes", sum(queue.bytes for queue in all_queues)),
        ("reserved_memory_ratio", f"{reserved / memory:.3f}"),
        ("curr_connections", len(server.connections)),
        ("total_connections", server.connections_ever),
        ("cmd_get", queues.gets),
        ("cmd_set", queues.sets),
        ("cmd_peek", queues.peeks),
        ("get_hits", queues.hits),
        ("get_misses", queues.misses),
        ("bytes_read", server.bytes_read),
        ("bytes_written", server.bytes_written),
        ("queue_creates", queues.creates),
        ("queue_deletes", queues.deletes),
        ("queue_expires", queues.expires),
    ]


def of_queue(queue: ServedQueue, journal: SharedJournal) -> list[tuple[str, object]]:
    """The figures of one queue, in kestrel's order; ours follow, and ``children`` is last."""
    readers = queue.stats()
    files = journal.queue.stats() if journal.queue is not None else None
    side = queue.side.stats() if queue.side is not None else None
    items = sum(reader.items - reader.open_items for reader in readers)
    figures: list[tuple[str, object]] = [
        ("items", items),
        ("bytes", sum(reader.bytes - reader.open_bytes for reader in readers)),
        ("total_items", queue.total_items),
        ("logsize", sum(each.journal_bytes for each in (files, side) if each is not None)),
        ("expired_items", sum(reader.expired for reader in readers)),
        ("mem_items", sum(reader.memory_items for reader in readers)),
        ("mem_bytes", sum(reader.memory_bytes for reader in readers)),
        ("age", queue.age_ms),
        ("discarded", queue.discarded),
        ("waiters", len(queue.line)),
        ("open_transactions", len(queue.reads)),
        ("transactions", queue.transactions),
        ("canceled_transactions", queue.canceled),
        ("total_flushes", queue.flushes),
        ("journal_rewrites", 0),
        ("journal_rotations", sum(each.rotations for each in (files, side) if each is not None)),
        ("expired_lost", queue.expired_lost),
        ("hook_errors", sum(reader.hook_errors for reader in readers)),
        ("create_time", queue.made_ms // 1000),
    ]
    if queue is journal.own and journal.children:
        figures.append(("children", ",".join(child.decode("latin-1") for child in journal.children)))
    return figures


def served_journals(queues: Queues) -> list[ServedJournal]:
    """The journaled queues of all that clients see. A fan-out is a reader of its parent's, and what was put for it
    alone is in a queue of its own name.
    """
    found: dict[bytes, tuple[JournaledQueue, dict[str, tuple[str, int]]]] = {}
    for served in list(queues.by_name.values()):
        shared = queues.journal_of(served).queue
        if shared is not None:
            readers = found.setdefault(served.parent, (shared, {}))[1]
            if served.reader is not None:
                child = split(served.name)[1] or b""
                readers[served.reader.name] = _shown(child), len(served.line)
        if served.side is not None:
            found[served.name] = served.side, {}
    return [ServedJournal(_shown(name), *each) for name, each in found.items()]


def _shown(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def of_alias(alias: Alias) -> list[tuple[str, object]]:
    return [
        ("put_items", alias.put_items),
        ("put_bytes", alias.put_bytes),
        ("children", ",".join(target.decode("latin-1") for target in alias.targets)),
    ]


def dump(name: bytes, figures: list[tuple[str, object]] | None) -> Iterator[bytes]:
    """A queue's block of ``dump_stats`` or ``dump_config``. ``None``: there is no such queue."""
    yield b"queue '%b' {\r\n" % name
    if figures is None:
        yield b"  \r\n"
    else:
        for key, value in figures:
            yield f"  {key}={value}\r\n".encode("latin-1")
    yield b"}\r\n"
