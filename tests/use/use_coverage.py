"""What a run has seen: states that must have been reached, and pairs of an operation and what was so at that moment.

A state of ``SOMETIMES`` that a run of ``make test-all`` has not reached is a failure: the explorer, or the library, has
changed so that a place is not visited any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

SOMETIMES = (
    "a batch is published",
    "a dead letter after the iteration",
    "a dead letter could not be dropped",
    "a dead letter is dropped",
    "a dead letter is put back",
    "a move is done that had failed",
    "a move meets a full disk",
    "a process is killed in the middle of a move",
    "an item is delayed",
    "an item is given up",
    "an item is moved to the dead letters",
    "an item that died comes again",
    "an opening finds an item that was moved",
    "a batch is taken in",
    "a call out of a callback of get_future",
    "a call out of a callback of put_future",
    "a call out of on_abort",
    "a call out of on_delivery",
    "a call out of on_expired",
    "a call out of on_timeout",
    "a cancelled aput",
    "a default reader beside named ones, at the end",
    "a first reader takes over a place",
    "a foreign first reader while the default one is open",
    "a future is cancelled",
    "a loop is thrown away",
    "a part named twice",
    "a part with an item that is too large",
    "a process is killed",
    "a process is stopped",
    "a put from a callback of a leader",
    "a put is refused",
    "the journal has no room",
    "a reader is too far behind",
    "a reader is moved forward",
    "a reader was moved while nobody had it open",
    "a queue is erased",
    "a queue is open elsewhere",
    "a queue is opened again",
    "a queue is visited",
    "a reader is dropped",
    "a reader is open elsewhere already",
    "a seek back",
    "a seek during a retirement",
    "a step of another process in the middle of a call",
    "a task has got an item",
    "a task changes a job",
    "a task has put an item",
    "a task is cancelled",
    "a deleted file",
    "a queue that is not there, as Arrow",
    "items are put through the inbox in one call",
    "items as Arrow",
    "a repair of what was damaged",
    "an odd option of a queue is refused",
    "an open default reader gets a name",
    "no default reader",
    "one flipped bit",
    "SystemExit out of a callback of get_future",
    "MemoryError out of on_delivery",
    "the clock jumps",
    "the clock jumps back",
    "the same again and again",
    "a batch of jobs of several tubes",
    "a block with a job",
    "a delete on a full disk",
    "a future has got a job",
    "a job has another body",
    "a job is given back, and waits as the queue says",
    "a job is refused",
    "a job is reserved",
    "a process asks for a job before its timers have run",
    "a queue in memory",
    "a queue is taken for one of another kind",
    "a session is closed",
    "a session is dropped",
    "a session of some tubes",
    "a task that waits for a job is cancelled",
    "a task that waits for a job is left",
    "a task that waits for a job is waited for",
    "a work queue is opened again",
    "a call out of a callback of reserve_future",
    "zero free blocks",
    "zero free blocks after a restart",
    "a call of a queue that another owner has",
    "a flush",
    "a join of all that is done",
    "a join of what is not done",
    "a log is taken up again",
    "a put is refused as the store is behind",
    "a queue is handed over",
    "a queue is opened while its store is away",
    "a queue is restored",
    "a queue is shipped",
    "a queue is taken over elsewhere",
    "a queue that another owner has is opened again",
    "a queue that is shipped is closed",
    "a queue that is shipped is opened without a word of it",
    "a store is away",
    "a store is flaky",
    "a store is raising",
    "a store is read only",
    "a store is stuck",
    "another owner takes a queue",
    "garbage is collected",
    "a queue is scraped",
    "a queue in trouble is scraped",
    "a folder is watched",
    "a queue is restored lazily",
    "a standby is at the end of its log",
    "a standby may take over",
    "a standby sees another store",
    "a standby takes over",
    "an item is not here, and the store is away",
    "an old owner takes its queue back",
    "what was not shipped is set aside",
)


class Coverage:
    """Counters, to be summed over seeds. Steps that had nothing to do are not counted."""

    def __init__(self) -> None:
        self.operations: Counter[str] = Counter()
        self.sometimes: Counter[str] = Counter()
        self.pairs: Counter[tuple[str, str]] = Counter()
        self.seeds = 0
        self.unrepeated = 0
        """Failures that their seeds did not show a second time."""

    @property
    def steps(self) -> int:
        return self.operations.total()

    def add(self, other: Coverage) -> None:
        self.operations += other.operations
        self.sometimes += other.sometimes
        self.pairs += other.pairs
        self.seeds += other.seeds
        self.unrepeated += other.unrepeated

    def never(self) -> list[str]:
        """The states that were not reached."""
        return [state for state in SOMETIMES if not self.sometimes[state]]

    def missing_pairs(self, operations: Iterable[str], tags: Iterable[str]) -> list[tuple[str, str]]:
        """Pairs of an operation and an option, or a state of the environment, that have not met."""
        every = list(tags)
        return [(name, tag) for name in operations for tag in every if not self.pairs[name, tag]]
