"""Errors: each is what api.md says it is too, and carries its facts."""

from __future__ import annotations

import errno
import pickle
import queue
import sys
from typing import Any

import pytest

import kestrelpy
from kestrelpy import errors

CASES: dict[str, tuple[Exception, type[Exception], dict[str, Any]]] = {
    "QueueEmpty": (errors.QueueEmpty("x"), queue.Empty, {}),
    "QueueFull": (errors.QueueFull(reader="jobs+a"), queue.Full, {"reader": "jobs+a"}),
    "QueueClosed": (errors.QueueClosed("x"), Exception, {}),
    "ItemTooLarge": (errors.ItemTooLarge(9, 8), ValueError, {"item_bytes": 9, "max_item_bytes": 8}),
    "BatchTooLarge": (errors.BatchTooLarge(9, 8), ValueError, {"batch_bytes": 9, "max_batch_bytes": 8}),
    "InvalidName": (errors.InvalidName("a/b", "why"), ValueError, {"name": "a/b", "reason": "why"}),
    "NoDefaultReader": (
        errors.NoDefaultReader("q", ("a", "b")),
        LookupError,
        {"queue_name": "q", "readers": ("a", "b")},
    ),
    "UnknownItem": (errors.UnknownItem(7, "q+a"), LookupError, {"item_id": 7, "reader": "q+a"}),
    "QueueLocked": (errors.QueueLocked("/d/q.lock", 12), Exception, {"path": "/d/q.lock", "pid": 12}),
    "ForkedQueue": (errors.ForkedQueue(12), Exception, {"opened_by": 12}),
    "CorruptJournal": (
        errors.CorruptJournal("/d/f", 96, "bad", item_id=3),
        Exception,
        {"path": "/d/f", "offset": 96, "reason": "bad", "item_id": 3},
    ),
    "UnsupportedFormat": (
        errors.UnsupportedFormat("/d/f", 2, 1),
        Exception,
        {"path": "/d/f", "version": 2, "supported": 1},
    ),
    "WrongKind": (errors.WrongKind("/d/q", "work queue"), ValueError, {"path": "/d/q", "kind": "work queue"}),
    "RepairIncomplete": (errors.RepairIncomplete("/d/q"), Exception, {"path": "/d/q"}),
    "RepairRefused": (errors.RepairRefused("/d/q", "why"), Exception, {"path": "/d/q", "reason": "why"}),
    "RestoreIncomplete": (errors.RestoreIncomplete("/d/q"), Exception, {"path": "/d/q"}),
    "QueueDiskFull": (errors.QueueDiskFull("/d"), OSError, {"errno": errno.ENOSPC, "filename": "/d", "path": "/d"}),
    "DurabilityUnknown": (
        errors.DurabilityUnknown("/d", 3, 5, OSError(errno.EDQUOT, "x")),
        OSError,
        {"errno": errno.EDQUOT, "first_id": 3, "last_id": 5, "path": "/d"},
    ),
}


def test_every_leaf_has_a_case() -> None:
    leaves = {name for name in errors.__all__ if name != "KestrelError"}
    assert leaves == set(CASES)
    assert set(errors.__all__) <= set(kestrelpy.__all__)


@pytest.mark.parametrize("name", CASES)
def test_facts_and_bases(name: str) -> None:
    error, base, facts = CASES[name]
    assert type(error).__name__ == name
    assert isinstance(error, errors.KestrelError)
    assert isinstance(error, base)
    assert {key: getattr(error, key) for key in facts} == facts
    assert "\n" not in str(error)


@pytest.mark.parametrize("name", [name for name, (_, _, facts) in CASES.items() if facts and name != "QueueFull"])
def test_the_sentence_names_the_facts(name: str) -> None:
    error, _, facts = CASES[name]
    shown = [
        value
        for key, value in facts.items()
        if key not in ("errno", "readers") and (name, key) != ("CorruptJournal", "item_id")
    ]
    shown += facts.get("readers", ())
    assert all(str(value) in str(error) for value in shown)


def test_closed_is_the_standard_librarys_shutdown_where_there_is_one() -> None:
    if sys.version_info >= (3, 13):
        assert issubclass(errors.QueueClosed, queue.ShutDown)
    else:
        assert not hasattr(queue, "ShutDown")


def test_durability_unknown_without_a_cause_is_eio() -> None:
    assert errors.DurabilityUnknown("/d", 1, 2).errno == errno.EIO
    assert errors.DurabilityUnknown("/d", 1, 2, OSError("no number")).errno == errno.EIO


def test_durability_unknown_when_all_items_are_durable_names_none() -> None:
    """A sync fails although nothing was put since the last one, as that of a new segment's name."""
    error = errors.DurabilityUnknown("/d", 32, 31)
    assert "no item is in doubt" in str(error)
    assert "32" not in str(error)
    assert list(range(error.first_id, error.last_id + 1)) == []


def test_a_lock_without_a_known_holder() -> None:
    error = errors.QueueLocked("/d/q.lock")
    assert error.pid is None
    assert "None" not in str(error)


@pytest.mark.parametrize("name", CASES)
def test_they_cross_processes_with_their_facts(name: str) -> None:
    error, _, facts = CASES[name]
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert {key: getattr(other, key) for key in facts} == facts
