"""File names: what a queue or a reader may be called, and which file in a folder belongs to which of them.

For queue ``jobs`` and reader ``audit`` (the default reader's name is empty):

    jobs.1700000000000.segment      a segment; the number orders them (rule R34)
    jobs.1700000000000.new.segment  the newest one, while no part of it is known to be on disk (rule R1)
    jobs.1700000000000.0a1b2c3d.segment  in an archive where another queue's segment has the plain name: with 8 hex
                                    digits of its queue_id
    jobs.mark                       the queue's mark: how far the journal was durable at its last clean close
    jobs.work                       there if the journal is a work queue's (rules: ``purpose``)
    jobs.1000.limit                 the largest item that the owner accepts has 1000 bytes (rules: ``item_limit``)
    jobs.ship                       where the queue is shipped, and which part of the log there is ours
    jobs.restore                    there while the queue is being restored from a store: it can't be opened
    jobs.repair                     there while the files are being repaired: what is still to be done
    jobs.lazy                       which segments are not here yet, after such a restore: only its owner opens it
    jobs.orphans                    the list of the folders below; no file of the queue: it outlives ``erase``
    jobs.standby                    there while the files follow a log in a store: no reader can be opened
    jobs.lock                       held by the process that writes the queue
    jobs.readers.lock               held briefly: while readers are made or dropped and segments are retired
    jobs+audit.checkpoint           the reader's saved state
    jobs+audit.lock                 held by the process that owns the reader
    jobs+audit.batch                the last plan of a driver buffer on that reader (``kestrelpy.spark``)
    jobs+audit.checkpoint.tmp       the spare file of a reader, room for its next checkpoint; also jobs.mark.tmp
    jobs+.lock.tmp                  room for the second file of the first reader, while there is no reader
    *.tmp                           one of the other files before it is whole; removed at open (rule R8)
    jobs.1700000000000.4096.quarantine   the bytes of damaged records at that offset of that segment, kept aside
    jobs+audit.checkpoint.1.damaged      a damaged checkpoint that a repair has kept aside; also jobs.mark.1.damaged

folders beside them:

    jobs.7.orphan                   segments of an owner that was taken over, with what it had not shipped in epoch 7;
                                    jobs.7-2.orphan and so on if there is one already

and in the folder ``inbox``:

    jobs.018bcfe568000123456789abcdef0123.part   items of a batch not yet published; the first 12 digits: its start
    jobs.1700000000000.batch   a published batch; the number orders them
    jobs.1700000000000.batch.refused   a batch that can't be ingested, kept aside
    jobs.batches                the ledger of ingested batches; jobs.1700000000000.batches.damaged: one kept aside
    jobs.lock                   held briefly by a process that publishes
    *.tmp                       one of the files above before it is whole
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from kestrelpy.errors import InvalidName, QueueLocked, RepairIncomplete, RestoreIncomplete

if TYPE_CHECKING:
    import re

INBOX = "inbox"
"""The folder, beside the queues, of the batches that other processes publish."""
_NEW = ".new.segment"
_LEGAL = r"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}"
_SEGMENT = r"([A-Za-z0-9_][A-Za-z0-9_-]{0,99})\.([0-9]{1,19})(?:\.(?:[0-9a-f]{8}|new))?\.segment"
_CHECKPOINT = r"([A-Za-z0-9_][A-Za-z0-9_-]{0,99})\+([A-Za-z0-9_][A-Za-z0-9_-]{0,99})?\.checkpoint"
_OF_QUEUE = (
    r"([A-Za-z0-9_][A-Za-z0-9_-]{0,99})"
    r"(?:\.[0-9]{1,19}(?:\.(?:[0-9a-f]{8}|new))?\.segment|\.[0-9]{1,19}\.[0-9]{1,19}\.quarantine|\.[0-9]{1,19}\.limit"
    r"|\.mark(?:\.[0-9]{1,9}\.damaged)?|\.work|\.ship|\.restore|\.repair|\.lazy|\.standby|\.lock|\.readers\.lock"
    r"|\+(?:[A-Za-z0-9_][A-Za-z0-9_-]{0,99})?\.(?:checkpoint(?:\.[0-9]{1,9}\.damaged)?|lock))(\.tmp)?"
)
_IN_INBOX = (
    r"([A-Za-z0-9_][A-Za-z0-9_-]{0,99})"
    r"(?:\.([0-9a-f]{32})\.part|\.([0-9]{13,19})\.batch(\.refused)?"
    r"|\.batches|\.[0-9]{13,19}\.batches\.damaged|\.lock)(\.tmp)?"
)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    import re  # here, and nothing compiled at import: a program without a queue on disk must not pay for it

    return re.compile(pattern)


def check_name(name: str) -> str:
    """Return ``name`` if it is a legal queue or reader name; raise ``InvalidName`` otherwise."""
    if not isinstance(name, str):
        raise InvalidName(name, "a name is a str")
    if not _compiled(_LEGAL).fullmatch(name):
        raise InvalidName(name, "1 to 100 characters of A-Z a-z 0-9 _ -, not starting with -")
    return name


def is_name(name: str) -> bool:
    """Whether ``check_name`` accepts it."""
    return _compiled(_LEGAL).fullmatch(name) is not None


def segment_name(queue: str, number: int) -> str:
    return f"{queue}.{number:013d}.segment"


def new_segment_name(queue: str, number: int) -> str:
    """The name of a segment of which no part is known to be on disk."""
    return f"{queue}.{number:013d}{_NEW}"


def is_new(name: str) -> bool:
    """Whether the name is that of a segment of which no part was known to be on disk."""
    return name.endswith(_NEW)


def lasting_name(name: str) -> str:
    """The name that a segment has once it is known to be on disk."""
    return f"{name.removesuffix(_NEW)}.segment" if is_new(name) else name


def archived_name(queue: str, number: int, queue_id: bytes) -> str:
    """The name in an archive where another queue's segment already has the plain name."""
    return f"{queue}.{number:013d}.{queue_id[:4].hex()}.segment"


def quarantine_name(queue: str, number: int, offset: int) -> str:
    return f"{queue}.{number:013d}.{offset}.quarantine"


def mark_name(queue: str) -> str:
    return f"{queue}.mark"


def work_name(queue: str) -> str:
    return f"{queue}.work"


def ship_name(queue: str) -> str:
    return f"{queue}.ship"


def restore_name(queue: str) -> str:
    return f"{queue}.restore"


def repair_name(queue: str) -> str:
    return f"{queue}.repair"


def damaged_name(name: str, number: int) -> str:
    """The name under which a damaged checkpoint or mark called ``name`` is kept aside. ``number``: from 1."""
    return f"{name}.{number}.damaged"


def lazy_name(queue: str) -> str:
    return f"{queue}.lazy"


def refuse_unrestored(names: Iterable[str], queue: str, folder: str, *, repairing: bool = False) -> None:
    """Raise ``RestoreIncomplete`` if a restore of ``queue`` has not ended, by the ``names`` in its folder; and
    ``RepairIncomplete`` if a repair has not, unless this is the repair (``repairing``).
    """
    if repair_name(queue) in names and not repairing:
        raise RepairIncomplete(f"{folder}/{queue}")
    if restore_name(queue) in names:
        raise RestoreIncomplete(f"{folder}/{queue}", follows=standby_name(queue) in names)
    if lazy_name(queue) in names:
        raise RestoreIncomplete(f"{folder}/{queue}", lazily=True)


def standby_name(queue: str) -> str:
    return f"{queue}.standby"


def refuse_standby(names: Iterable[str], queue: str, folder: str) -> None:
    """Raise ``QueueLocked`` if the files of ``queue`` follow a log in a store, by the ``names`` in their folder."""
    if standby_name(queue) in names:
        raise QueueLocked(f"{folder}/{standby_name(queue)}")


def orphan_name(queue: str, epoch: int, number: int = 1) -> str:
    """The name of a folder. ``number``: from 1, of those of one epoch."""
    return f"{queue}.{epoch}.orphan" if number == 1 else f"{queue}.{epoch}-{number}.orphan"


def orphans_name(queue: str) -> str:
    return f"{queue}.orphans"


def limit_name(queue: str, max_item_bytes: int) -> str:
    return f"{queue}.{max_item_bytes}.limit"


def lock_name(queue: str) -> str:
    return f"{queue}.lock"


def readers_lock_name(queue: str) -> str:
    return f"{queue}.readers.lock"


def checkpoint_name(queue: str, reader: str) -> str:
    return f"{queue}+{reader}.checkpoint"


def reader_lock_name(queue: str, reader: str) -> str:
    return f"{queue}+{reader}.lock"


def temporary_name(name: str) -> str:
    return f"{name}.tmp"


def parse_segment(file_name: str, queue: str) -> int | None:
    """The number of a segment of ``queue``; ``None`` if the file is not one."""
    match = _compiled(_SEGMENT).fullmatch(file_name)
    return int(match[2]) if match and match[1] == queue else None


def segments_among(names: Iterable[str], queue: str) -> list[tuple[int, str]]:
    """The segments of ``queue`` among a folder's ``names``: number and name, in order (R34).

    A segment that was renamed during the listing may be listed under both names: it appears under its lasting name.
    """
    prefix = f"{queue}."
    mine = [name for name in names if name.startswith(prefix) and name.endswith(".segment")]
    there = {(number, name) for name in mine if (number := parse_segment(name, queue)) is not None}
    return sorted(each for each in there if not is_new(each[1]) or (each[0], lasting_name(each[1])) not in there)


def of_queue(names: Iterable[str], queue: str) -> list[str]:
    """Those of a folder's ``names`` that begin like the names of the files of ``queue``."""
    mine = (f"{queue}.", f"{queue}+")
    return [name for name in names if name.startswith(mine)]


def but_for_locks(names: Iterable[str], queue: str) -> set[str]:
    """The files of ``queue`` among a folder's ``names``, but for its own two locks: those alone are no queue."""
    mine = {name for name in names if (parse_owner(name) or ("", False))[0] == queue}
    return mine - {lock_name(queue), readers_lock_name(queue)}


def parse_checkpoint(file_name: str, queue: str) -> str | None:
    """The reader's name (empty: the default reader); ``None`` if the file is no checkpoint of ``queue``."""
    match = _compiled(_CHECKPOINT).fullmatch(file_name)
    return (match[2] or "") if match and match[1] == queue else None


def readers_among(names: Iterable[str], queue: str) -> set[str]:
    """The readers of ``queue`` that have a checkpoint among a folder's ``names``; the default one's name is empty."""
    prefix = f"{queue}+"
    mine = [name for name in names if name.startswith(prefix) and name.endswith(".checkpoint")]
    return {reader for name in mine if (reader := parse_checkpoint(name, queue)) is not None}


def owned_among(names: Iterable[str], queue: str) -> set[str]:
    """The readers of ``queue`` that were ever owned: those with a lock file among a folder's ``names``."""
    prefix = f"{queue}+"
    mine = [name for name in names if name.startswith(prefix) and name.endswith(".lock")]
    return {reader for name in mine if (reader := parse_checkpoint(f"{name[:-5]}.checkpoint", queue)) is not None}


def limits_among(names: Iterable[str], queue: str) -> set[int]:
    """The sizes of the largest accepted item, in bytes, that files of ``queue`` among a folder's ``names`` state."""
    start, end = f"{queue}.", ".limit"
    sizes = (name[len(start) : -len(end)] for name in names if name.startswith(start) and name.endswith(end))
    return {int(size) for size in sizes if size.isascii() and size.isdigit() and len(size) < 20}


def plan_name(queue: str, reader: str) -> str:
    return f"{queue}+{reader}.batch"


def is_plan(file_name: str, queue: str) -> bool:
    """Whether a file is a driver buffer's plan for a reader of ``queue``, or one that is not whole yet.

    A plan is not one of the queue's files: it outlives ``erase``, so that batch ids continue.
    """
    base = file_name.removesuffix(".tmp")
    return base.endswith(".batch") and parse_checkpoint(f"{base[:-6]}.checkpoint", queue) is not None


def queues_among(names: Iterable[str]) -> list[str]:
    """The queues that have files among these, sorted."""
    owners = (parse_owner(name) for name in names)
    return sorted({owner[0] for owner in owners if owner is not None and not owner[1]})


def parse_owner(file_name: str) -> tuple[str, bool] | None:
    """The queue that a file belongs to, and whether the file is a temporary one; ``None`` for a foreign file."""
    match = _compiled(_OF_QUEUE).fullmatch(file_name)
    return (match[1], match[2] is not None) if match else None


# -- the inbox -------------------------------------------------------------------------------------------------------


class InInbox(NamedTuple):
    """What a file of an inbox is: a part (``part_id``), a published batch (``number``), or neither."""

    queue: str
    part_id: bytes | None
    number: int | None
    is_refused: bool
    is_temporary: bool


def part_name(queue: str, part_id: bytes) -> str:
    return f"{queue}.{part_id.hex()}.part"


def batch_name(queue: str, number: int) -> str:
    return f"{queue}.{number:013d}.batch"


def refused_name(queue: str, number: int) -> str:
    return f"{batch_name(queue, number)}.refused"


def ledger_name(queue: str) -> str:
    return f"{queue}.batches"


def damaged_ledger_name(queue: str, number: int) -> str:
    return f"{queue}.{number:013d}.batches.damaged"


def part_begun_ms(part_id: bytes) -> int:
    """When a part was begun, by the clock of its maker, in milliseconds since the Unix epoch."""
    return int.from_bytes(part_id[:6], "big")


def parse_inbox(file_name: str) -> InInbox | None:
    """What a file of an inbox is; ``None`` for a foreign file."""
    match = _compiled(_IN_INBOX).fullmatch(file_name)
    if match is None:
        return None
    queue, part_id, number, refused, temporary = match.groups()
    return InInbox(
        queue,
        None if part_id is None else bytes.fromhex(part_id),
        None if number is None else int(number),
        refused is not None,
        temporary is not None,
    )


def batches_among(names: Iterable[str], queue: str) -> list[tuple[int, str]]:
    """The published batches of ``queue`` among an inbox's ``names``: number and name, in order."""
    prefix = f"{queue}."
    mine = [(name, parse_inbox(name)) for name in names if name.startswith(prefix) and name.endswith(".batch")]
    return sorted((about.number, name) for name, about in mine if about is not None and about.number is not None)


def refused_among(names: Iterable[str], queue: str) -> list[str]:
    """The batches of ``queue`` among an inbox's ``names`` that can't be ingested and are kept aside."""
    prefix = f"{queue}."
    mine = [(name, parse_inbox(name)) for name in names if name.startswith(prefix) and name.endswith(".refused")]
    return sorted(name for name, about in mine if about is not None and about.queue == queue)


def publishing_queues(names: Iterable[str]) -> set[str]:
    """The queues that have a published batch among an inbox's ``names``."""
    found = (parse_inbox(name) for name in names if name.endswith(".batch"))
    return {about.queue for about in found if about is not None}
