"""``Panel``: all that one collector looks at, and the labels that its samples have."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from typing import Any

from kestrelpy import JournaledQueue
from kestrelpy.metrics.page import Key, MetricSource, Page
from kestrelpy.metrics.sources import FolderSource, QueueSource, ServerSource, WorkSource
from kestrelpy.metrics.table import DIRECTORY, RESERVED, Metric
from kestrelpy.work import WorkQueue

__all__ = ["Panel"]

_LABEL = re.compile("[a-zA-Z_][a-zA-Z0-9_]*")


class Panel:
    """The sources of one collector. Raises ``TypeError`` and ``ValueError`` for targets and labels that can't be.

    Samples have the label ``directory`` if the targets are in several folders: else two queues might look like one.

    NOTE ON LOCKING: ``_turn`` is held while the sources are read, so that two scrapes take turns. Nothing but a scrape
    asks for it.
    """

    def __init__(self, targets: tuple[Any, ...], labels: Mapping[str, str] | None) -> None:
        if not targets:
            raise TypeError("give at least one queue or folder whose figures are wanted")
        sources = [_source_of(target) for target in targets]
        self._shows_directory = len({source.directory for source in sources} - {""}) > 1
        if not self._shows_directory:
            for source in sources:
                source.directory = ""  # a key has no more than its sample's labels: of two alike, the first counts
        names = [(source.directory, source.name) for source in sources if source.name]
        for directory, name in names:
            if names.count((directory, name)) > 1:
                raise ValueError(f"queue {name!r}{f' of {directory}' if directory else ''} was given twice")
        # What is open here first: a folder adds what is not on the page yet.
        self._sources = sorted(sources, key=lambda source: isinstance(source, FolderSource))
        self._extra = _checked(labels)
        self._turn = threading.Lock()

    def read(self) -> Page:
        """Read all sources now. Raises nothing."""
        page = Page()
        with self._turn:
            for source in self._sources:
                source.report(page)
        return page

    def labels(self, metric: Metric, key: Key) -> dict[str, str]:
        """All labels of a sample of this metric."""
        labels = dict(zip(metric.labels, key[1:], strict=True))
        if self._shows_directory:
            labels[DIRECTORY] = key[0]
        return labels | self._extra


def _source_of(target: Any) -> MetricSource:
    if isinstance(target, JournaledQueue):
        return QueueSource(target, os.path.realpath(target.directory))
    if isinstance(target, WorkQueue):
        return WorkSource(target, "" if target.directory is None else os.path.realpath(target.directory))
    if isinstance(target, str | os.PathLike):
        folder = os.fspath(target)
        if isinstance(folder, str) and folder:
            return FolderSource(folder, os.path.realpath(folder))
        raise ValueError(f"a folder must have a name, and that must be text, not {folder!r}")

    from kestrelpy.server import QueueServer  # whoever has a server has imported this

    if isinstance(target, QueueServer):
        return ServerSource(target)
    raise TypeError(f"a queue, a work queue, a folder or a server is wanted, not {target!r}")


def _checked(labels: Mapping[str, str] | None) -> dict[str, str]:
    checked = {}
    for name, value in ({} if labels is None else labels).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"labels must map text to text, not {name!r} to {value!r}")
        if not _LABEL.fullmatch(name) or name.startswith("__"):
            raise ValueError(f"labels: {name!r} is no name of a label: letters, digits and _, no digit and no __ first")
        if name in RESERVED:
            raise ValueError(f"labels: {name!r} is the name of a label that the library sets")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"labels: {name!r} has a value that is no text: {value!r}") from None
        checked[name] = value
    return checked
