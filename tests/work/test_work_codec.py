"""Jobs whose bodies are values: ``WorkQueue(codec=...)``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kestrelpy.codecs import JSON, UTF8, DecodeError, encrypted
from kestrelpy.outbox import Outbox
from kestrelpy.testing import ManualClock
from kestrelpy.work import JobTooBig, NewJob, WorkQueue

VALUES: list[Any] = [{"to": "a@example.org", "tries": 3}, [1, 2.5, None], "h\u00e4\u00dflich", 7, None, True, ""]


def test_values_come_back(folder: Path) -> None:
    with WorkQueue(folder, "mail", codec=JSON) as queue:
        for value in VALUES:
            queue.put(value)
    with WorkQueue(folder, "mail", codec=JSON) as queue, queue.session() as session:
        assert [job.value for job in session.reserve_many(100)] == VALUES


def test_each_way_to_put_encodes_and_each_way_to_look_decodes() -> None:
    with WorkQueue(None, codec=JSON) as queue:
        asyncio.run(queue.aput({"n": 1}))
        queue.put_many([{"n": 2}, {"n": 3}])
        queue.put_all([NewJob({"n": 4}, key="four")])
        assert queue.peek(1).value == queue.peek_ready().value == {"n": 1}
        assert queue.peek_key("four").value == {"n": 4}
        with queue.session() as session:
            taken = [session.reserve(0), session.reserve_future().result(0), asyncio.run(session.areserve(0))]
            assert [job.value["n"] for job in [*taken, session.reserve_job(4)]] == [1, 2, 3, 4]


def test_a_new_body_is_a_value_too() -> None:
    with WorkQueue(None, codec=JSON) as queue, queue.session() as session:
        queue.put({"tries": 0})
        job = session.reserve(0)
        assert job.release(body={"tries": job.value["tries"] + 1})
        again = session.reserve(0)
        assert again.value == {"tries": 1}
        again.bury(body={"tries": 2})
        assert queue.peek_buried().value == {"tries": 2}
        queue.kick(1)
        session.reserve(0)
        session.release(1, body={"tries": 3})
        assert queue.peek(1).value == {"tries": 3}


def test_without_a_codec_the_value_is_the_body() -> None:
    with WorkQueue(None) as queue:
        queue.put(b"plain")
        assert (queue.codec, queue.peek(1).value) == (None, b"plain")
        with pytest.raises(TypeError, match=r"must be bytes, bytearray or memoryview, not dict: .* codec="):
            queue.put({"n": 1})  # type: ignore[arg-type]


def test_what_the_codec_refuses_is_not_stored() -> None:
    with WorkQueue(None, codec=JSON, max_job_bytes=20) as queue:
        with pytest.raises(TypeError):
            queue.put(object())
        with pytest.raises(TypeError):
            queue.put_many([1, b"bytes are no JSON"])
        with pytest.raises(JobTooBig):
            queue.put("x" * 19)
        assert queue.stats().jobs == 0
        queue.put("x" * 18)


def test_a_codec_that_gives_no_bytes_is_named() -> None:
    class Wrong:
        def encode(self, value: object) -> Any:
            return str(value)

        def decode(self, data: bytes) -> object:
            return data

        def __repr__(self) -> str:
            return "<Wrong>"

    with WorkQueue(None, codec=Wrong()) as queue, pytest.raises(TypeError, match="<Wrong> encodes to must be bytes"):
        queue.put(7)
    with pytest.raises(TypeError, match=r"encode\(\) and decode\(\)"):
        WorkQueue(None, codec=7)  # type: ignore[call-overload]


def test_a_body_that_does_not_decode_raises_and_its_job_is_released(folder: Path, clock: ManualClock) -> None:
    with WorkQueue(folder, "jobs") as queue:
        queue.put(b"{no json")
    with WorkQueue(folder, "jobs", codec=JSON, max_attempts=2, clock=clock) as queue, queue.session() as session:
        for _ in range(2):
            with pytest.raises(ValueError, match="property name"), session.reserve(0) as job:
                print(job.value)
        assert queue.peek_buried().body == b"{no json"


def test_bodies_are_not_on_disk_in_the_clear(folder: Path) -> None:
    keys = {"k1": bytes(16)}
    with WorkQueue(folder, "jobs", codec=encrypted(keys, inner=UTF8)) as queue:
        queue.put("a secret")
        assert queue.peek(1).value == "a secret"
    assert not any(b"a secret" in path.read_bytes() for path in folder.iterdir() if path.is_file())
    other = encrypted({"k1": bytes([1] * 16)}, inner=UTF8)
    with WorkQueue(folder, "jobs", codec=other) as queue, pytest.raises(DecodeError):
        print(queue.peek(1).value)


def test_an_outbox_writes_bodies_of_its_own() -> None:
    with WorkQueue(None, codec=JSON) as queue, pytest.raises(ValueError, match="codec"):
        Outbox(queue)
