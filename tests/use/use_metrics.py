"""A collector is scraped at any step: its figures are those of the model. And a watch follows the folder's files.

The scrape draws nothing, and nothing goes wrong with the disk while it lasts: so it changes no seed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kestrelpy import KestrelError, inbox, inspect
from kestrelpy.metrics import Collector
from tests.use.use_model import ReaderModel

if TYPE_CHECKING:
    from tests.use.use_world import Opened, Process, World

Figures = dict[tuple[str, str], float]
"""By metric and reader; without one, of the queue."""


def check(w: World) -> None:
    """Scrape what each process has open, and look at the folder."""
    with undisturbed(w):
        look(w)
        for process in w.processes:
            for opened in process.queues.values():
                check_opened(w, process, opened, scraped(w, opened))


@contextlib.contextmanager
def undisturbed(w: World) -> Iterator[None]:
    """Nothing happens in the middle of what is done here, and no fault is used up."""
    trouble = w.trouble
    kept = trouble.times, trouble.meanwhile_in, trouble.counts.copy()
    trouble.times = trouble.meanwhile_in = 0
    try:
        yield
    finally:
        trouble.times, trouble.meanwhile_in, trouble.counts = kept


def scraped(w: World, opened: Opened) -> Figures:
    try:
        families = list(Collector(opened.queue).collect())
    except Exception as error:
        raise w.fail(f"a scrape of {opened.queue!r} has raised {error!r}") from error
    samples = [sample for family in families for sample in family.samples if "le" not in sample.labels]
    w.require(all(sample.labels["queue"] == opened.model.name for sample in samples), "a sample is another queue's")
    return {(sample.name, sample.labels.get("reader", "")): sample.value for sample in samples}


def check_opened(w: World, process: Process, opened: Opened, figures: Figures) -> None:
    model, queue = opened.model, opened.queue
    is_up = figures["kestrel_up", ""] == 1
    if not is_up:
        w.require(len(figures) == 1, f"{queue!r} is in trouble, and has figures: {figures}")
        w.require(queue._status.error is not None, f"{queue!r} can be used, and kestrel_up is 0")
        w.saw("a queue in trouble is scraped")
        return
    w.require(not (model.failed or queue.closed), f"{queue!r} has failed or is closed, and kestrel_up is 1")
    w.saw("a queue is scraped")
    is_exact = not (model.flying or model.holes or model.damaged or model.batches or w.swarm.ships)
    if is_exact:
        puts = figures["kestrel_put_total", ""]
        w.require(puts == model.tail_id - opened.tail_id, f"{puts} items were put into {queue!r}, says a scrape")
    for reader in process.readers:
        handle = reader.handle
        is_open = reader.queue is model and handle is not None and handle._backlog.broken is None
        if is_open and w.is_here(reader) and not model.damaged:
            check_reader(w, reader, figures)


def check_reader(w: World, reader: ReaderModel, figures: Figures) -> None:
    name = reader.name
    items, opened = figures["kestrel_items", name], figures["kestrel_open_items", name]
    sure, high = w.sure_and_most(reader)
    is_right = len(sure) <= items <= high
    w.require(is_right, f"a scrape of {reader.full_name} says {items:.0f} items; it has {len(sure)} to {high}")
    w.require(opened >= len(reader.open), f"a scrape says {opened:.0f} open reads; {len(reader.open)} are known")
    size = figures["kestrel_bytes", name]
    w.require(figures["kestrel_lag_bytes", name] == size, f"{reader.full_name} has two sizes")
    given = figures["kestrel_delivered_total", name]
    over = figures["kestrel_committed_total", name] + figures["kestrel_aborted_total", name]
    w.require(given >= opened, f"{given:.0f} items were given out, and {opened:.0f} are open")
    w.require(over >= 0, f"{over:.0f} items are over")


def look(w: World) -> None:
    """What a watch says of the folder, look after look, is what ``inspect`` says."""
    found = w.watch.look()
    waiting = {name: one.pending_batches for name, one in found.items() if one.pending_batches}
    w.require(waiting == inbox.pending_queues(w.folder, disk=w.disk), f"a watch says that {waiting} wait in the inbox")
    for name, model in w.models.items():
        seen = found.get(name)
        if seen is None or model.damaged or model.half_erased:
            continue
        try:
            saved = inspect(w.folder, name, disk=w.disk)
        except KestrelError as error:
            w.require(seen.problem, f"inspect says {error!r}, and a watch {seen}")
            continue
        w.require(not (seen.problem or seen.is_estimated), f"a watch says {seen!r}, and inspect {saved}")
        mine = (seen.put_items, seen.put_bytes, seen.tail_id, seen.segments)
        theirs = (saved.put_items, saved.put_bytes, saved.tail_id, len(saved.segments))
        w.require(mine == theirs, f"a watch says {mine} of {name}, and inspect {theirs}")
        readers = [(each.name, each.head, each.items, each.bytes) for each in saved.readers]
        w.require([each[:4] for each in seen.readers] == readers, f"a watch says {seen}, and inspect {readers}")
        w.saw("a folder is watched")
