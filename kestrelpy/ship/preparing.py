"""Before a shipped queue is opened: what its folder does not have yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kestrelpy._disk.interface import Directory, Disk
from kestrelpy.errors import RestoreIncomplete
from kestrelpy.ship.lazy import LazyFolder, read_lazy
from kestrelpy.ship.opening import url_of
from kestrelpy.ship.options import Ship
from kestrelpy.ship.restoring import restore_missing
from kestrelpy.ship.ship_file import read_ship_file
from kestrelpy.ship.takeover import Takeover

if TYPE_CHECKING:
    from kestrelpy._journal.queue_files import QueueFiles


def prepare(ship: object, files: QueueFiles, disk: Disk | None, *, of_jobs: bool) -> None:
    """Restore a queue that is missing, if its user says so. If not all of it is here, have the rest fetched when it is
    read: ``files`` get another folder. ``ship``: as of ``JournaledQueue``, and not None or False. ``of_jobs``: it is a
    work queue's, which reads all of it at once, and beside the queue: then it is fetched as soon as it is locked.

    Raises as ``restore``, and ``RestoreIncomplete`` if the rest is in another store.
    """
    options = Ship(ship) if isinstance(ship, str) else ship.options if isinstance(ship, Takeover) else ship
    if not isinstance(options, Ship):
        return  # the opening refuses it
    if options.on_missing == "restore":
        restore_missing(options, files, disk)
    segments = read_lazy(files.directory, files.queue)
    if segments is None:
        return
    store, file = options.open(), read_ship_file(files.directory, files.queue)
    if file is None or file.url != url_of(options.store, store):
        raise RestoreIncomplete(f"{files.directory.path}/{files.queue}", lazily=True)
    folder = cast(Directory, LazyFolder(files.directory, files.queue, segments, store, at_once=of_jobs))
    files.directory = files.checkpoint_directory = folder
