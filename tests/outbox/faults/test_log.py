"""What is logged while the database fails: what the driver says, and neither SQL nor what is the user's."""

from __future__ import annotations

import threading

import pytest
import sqlalchemy

from kestrelpy.outbox.outbox import Outbox
from tests.support.patience import until


def test_a_database_that_fails_is_logged_in_one_line(
    engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLAlchemy's text of an error has the statement and its values: tracebacks, which have payloads."""
    begun, may_end = threading.Event(), threading.Event()

    def fails(payload: object) -> None:
        begun.set()
        assert may_end.wait(20)
        raise RuntimeError("card 4929")

    outbox = Outbox(engine, error_text="full", max_retries=0)
    outbox.add_consumer("q", fails)
    outbox.create_tables()
    with outbox.begin() as connection:
        job = outbox.put(connection, "q", "card 4929")
    outbox.start(threads=1, poll_interval=0.05)
    try:
        until(begun.is_set)
        with engine.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE kestrel_jobs RENAME TO away")
        may_end.set()
        until(lambda: "saving outcomes failed" in caplog.text and "the database failed" in caplog.text)
        with engine.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE away RENAME TO kestrel_jobs")
        until(lambda: outbox.get(job.id).status == "dead")
    finally:
        outbox.close()
    said = [record.getMessage() for record in caplog.records if "trying again" in record.getMessage()]
    assert said
    for message in said:
        assert "kestrel_jobs" in message  # what there is no table of
        assert "\n" not in message
        assert "card 4929" not in message
        assert "SELECT" not in message
