"""Errors of the outbox: each is what its page says it is too, carries its facts, and says what to do."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import kestrelpy.outbox
from kestrelpy.errors import KestrelError, copy_of
from kestrelpy.outbox import errors

CASES: dict[str, tuple[errors.OutboxError, type[Exception], dict[str, Any], str]] = {
    "UnknownQueue": (errors.UnknownQueue("mail"), Exception, {"queue": "mail"}, "outbox.queue('mail')"),
    "UnknownDependency": (errors.UnknownDependency(7), Exception, {"depends_on": 7}, "put it first"),
    "JobNotFound": (errors.JobNotFound(7), LookupError, {"job_id": 7, "queue": None, "key": None}, "keep_done"),
    "InvalidPayload": (
        errors.InvalidPayload("mail", 'payload["to"] is a set'),
        Exception,
        {"queue": "mail", "reason": 'payload["to"] is a set'},
        "mail",
    ),
    "DuplicateJob": (
        errors.DuplicateJob(7, "mail", "order-1"),
        Exception,
        {"job_id": 7, "queue": "mail", "key": "order-1"},
        "if_exists",
    ),
    "UnsupportedDatabase": (
        errors.UnsupportedDatabase("PostgreSQL 12.3"),
        ValueError,
        {"database": "PostgreSQL 12.3"},
        "PostgreSQL 13",
    ),
    "NotInTransaction": (
        errors.NotInTransaction("sqlite3.Connection"),
        Exception,
        {"connection": "sqlite3.Connection"},
        "begin",
    ),
    "NotSupported": (errors.NotSupported("lane"), Exception, {"feature": "lane"}, "SQLite"),
    "MissingPackage": (
        errors.MissingPackage("sqlalchemy", "outbox"),
        ImportError,
        {"package": "sqlalchemy", "extra": "outbox"},
        "pip install kestrelpy[outbox]",
    ),
}
each = pytest.mark.parametrize("name", CASES)


def test_every_leaf_has_a_case() -> None:
    assert set(errors.__all__) - {"OutboxError"} == set(CASES)
    assert set(errors.__all__) <= set(kestrelpy.outbox.__all__)


@each
def test_facts_and_bases(name: str) -> None:
    error, base, facts, _ = CASES[name]
    assert type(error).__name__ == name
    assert isinstance(error, errors.OutboxError)
    assert isinstance(error, KestrelError)
    assert isinstance(error, base)
    assert {key: getattr(error, key) for key in facts} == facts


@each
def test_the_sentence_is_one_line_that_names_the_facts_and_says_what_to_do(name: str) -> None:
    error, _, facts, advice = CASES[name]
    assert "\n" not in str(error)
    assert all(str(value) in str(error) for value in facts.values() if value is not None)
    assert advice in str(error)


@each
def test_they_cross_processes_with_their_facts(name: str) -> None:
    error, _, facts, _ = CASES[name]
    for other in (pickle.loads(pickle.dumps(error)), copy_of(error)):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert {key: getattr(other, key) for key in facts} == facts


def test_a_job_that_was_named_by_its_key() -> None:
    missing = errors.JobNotFound(queue="mail", key="order-1")
    assert (missing.job_id, missing.queue, missing.key) == (None, "mail", "order-1")
    assert "job of queue 'mail' with the key 'order-1'" in str(missing)
    assert "None" not in str(missing)
    unknown = errors.UnknownDependency(("mail", "order-1"))
    assert unknown.depends_on == ("mail", "order-1")
    assert "job of queue 'mail' with the key 'order-1'" in str(unknown)
    assert pickle.loads(pickle.dumps(unknown)).depends_on == ("mail", "order-1")
