"""The types of values: what the type checkers are told is what runs, and costs nothing there.

``tests/test_wheel.py`` has what mypy and pyright see.
"""

from __future__ import annotations

import inspect

import pytest

from kestrelpy import Codec, Item, JournaledQueue, Reader, open_reader
from kestrelpy._queue_options import OpeningOptions
from kestrelpy.codecs import UTF8
from kestrelpy.testing import MemoryDisk
from kestrelpy.work import Job, Session, WorkQueue
from kestrelpy.work.opening import WorkOptions

WITHOUT_CODEC = {"self", "directory", "name", "codec"}


def test_the_options_for_type_checkers_are_those_of_the_queue() -> None:
    """An option that is missing there would be an error to every type checker."""
    taken = inspect.signature(JournaledQueue.__init__).parameters
    annotations = {name: each.annotation for name, each in taken.items() if name not in WITHOUT_CODEC}
    assert {name: str(kind.__forward_arg__) for name, kind in OpeningOptions.__annotations__.items()} == annotations


def test_the_options_for_type_checkers_are_those_of_the_work_queue() -> None:
    taken = inspect.signature(WorkQueue.__init__).parameters
    annotations = {name: each.annotation for name, each in taken.items() if name not in WITHOUT_CODEC}
    assert {name: str(kind.__forward_arg__) for name, kind in WorkOptions.__annotations__.items()} == annotations


@pytest.mark.parametrize("generic", [JournaledQueue, Reader, Item, Codec, WorkQueue, Session, Job])
def test_a_parameter_is_accepted_and_changes_nothing(generic: type) -> None:
    assert generic[bytes].__origin__ is generic  # type: ignore[index]


def test_a_queue_of_a_parameter_is_a_queue() -> None:
    with JournaledQueue[str]("/q", "texts", codec=UTF8, disk=MemoryDisk()) as queue:
        queue.put("one")
        item = queue.get()
        assert (type(queue), type(item), item.value) == (JournaledQueue, Item, "one")
        assert not hasattr(item, "__dict__")


def test_a_reader_in_another_process_takes_the_codec() -> None:
    disk = MemoryDisk()
    with JournaledQueue("/q", "texts", codec=UTF8, disk=disk) as queue:
        queue.put("h\u00e4\u00dflich")
        reader = open_reader("/q", "texts", "mail", create=True, codec=UTF8, disk=disk)
        assert reader.get().value == "h\u00e4\u00dflich"
        reader.close()
        with pytest.raises(TypeError, match="encode"):
            open_reader("/q", "texts", "mail", codec=7, disk=disk)  # type: ignore[call-overload]
