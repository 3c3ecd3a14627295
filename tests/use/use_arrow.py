"""Operations that read a queue as Arrow, at any moment of its life: they show what ``scan`` shows."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import kestrelpy.arrow.reading  # noqa: F401 - now, and not within an operation that is watched
from kestrelpy import arrow, scan
from tests.use.use_model import QueueModel
from tests.use.use_opening import ARCHIVE, FOLDER, looking
from tests.use.use_operations import check_error, operation
from tests.use.use_outside import check_needed, check_shown, choose_model

if TYPE_CHECKING:
    from tests.use.use_world import Process, World

Shown = list[tuple[int, bytes]]


@operation("arrow", 0.5)
def read_as_arrow(w: World, rng: random.Random, process: Process) -> None:
    model = choose_model(w, rng)
    if model.is_going:
        return  # of which queue it is then, nobody says
    archived = model.archive == ARCHIVE and ARCHIVE in w.disk.folders
    options: dict[str, Any] = {"disk": process.disk, "columns": ["id", "data"]}
    if archived:
        options["archive"] = ARCHIVE
    first_id = rng.choice((None, None, rng.randint(1, model.tail_id + 2)))
    nested, fired, needed, made = w.nested, w.trouble.fired, model.needed(), model.made

    def read() -> Shown:
        batches = arrow.read(FOLDER, model.name, start_id=first_id, **options)
        return [row for batch in batches for row in zip(*(each.to_pylist() for each in batch), strict=True)]

    read.__doc__ = arrow.read.__doc__
    result = w.call(process, read)
    w.note_fault(model, result)
    quiet = nested == w.nested and fired == w.trouble.fired and not w.depth
    if isinstance(result.error, FileNotFoundError) and not made:
        w.saw("a queue that is not there, as Arrow")
        return
    if not result.ok:
        check_error(w, model, result, process)
        return
    sure = not (w.erasures and archived)
    check_shown(w, model, "arrow", result.value, sure=sure)
    if not quiet or model.damaged or model.erased or not sure:
        return
    if first_id is None:
        check_needed(w, model, needed, dict(result.value))
    check_same(w, model, result.value, first_id, archived=archived)


def check_same(w: World, model: QueueModel, shown: Shown, first_id: int | None, *, archived: bool) -> None:
    """As long as nobody else does anything, it is what ``scan`` shows."""
    folders = {"archive_dir": ARCHIVE} if archived else {}
    options: dict[str, Any] = {"disk": looking(w), "start_id": first_id, **folders}
    scanned = [(record.id, record.data) for record in scan(FOLDER, model.name, **options)]
    w.require(shown == scanned, f"arrow shows {len(shown)} items, and scan {len(scanned)}")
    if scanned:
        w.saw("items as Arrow")
