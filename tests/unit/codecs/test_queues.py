"""Every codec in every place of a queue: puts, batches, expiry, restarts, readers in other processes, the inbox."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import JournaledQueue, QueueEmpty, ReaderConfig, codecs, dead_letters, open_reader, scan
from kestrelpy.codecs import JSON, DecodeError, WrongKey
from kestrelpy.config import Codec
from kestrelpy.inbox import PartWriter, publish
from kestrelpy.testing import ManualClock
from tests.support.packages import need_codecs

need_codecs()

KEYS = {"new": bytes(range(32)), "old": bytes(16)}


@dataclasses.dataclass(frozen=True)
class Order:
    """What is ordered, and how much of it."""

    article: str
    count: int


FIRST, SECOND = Order("apple", 3), Order("h\u00e4\u00dflich", -1)
CODECS: dict[str, Codec[Any]] = {
    "msgspec as JSON": codecs.msgspec(Order),
    "msgspec as msgpack": codecs.msgspec(Order, "msgpack"),
    "pydantic": codecs.pydantic(Order),
    "zstd": codecs.zstd(codecs.pydantic(Order)),
    "encrypted": codecs.encrypted(KEYS, codecs.msgspec(Order)),
    "all of them": codecs.encrypted(KEYS, codecs.zstd(codecs.msgspec(Order, "msgpack"))),
}
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


@every_codec
def test_puts_of_every_kind_survive_a_restart(codec: Codec[Order], tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "orders", codec=codec) as queue:
        queue.put(FIRST)
        assert queue.put_many([FIRST, SECOND]) == range(2, 4)
        assert queue.put_future(SECOND).result(10) == 4
        assert asyncio.run(queue.aput(FIRST)) == 5
        queue.as_blocking_queue().put(SECOND)
    with JournaledQueue(tmp_path, "orders", codec=codec) as queue:
        assert [item.value for item in queue.get_many(6)] == [FIRST, FIRST, SECOND, SECOND, FIRST, SECOND]


@every_codec
def test_expiry(codec: Codec[Order], tmp_path: Path) -> None:
    clock = ManualClock(1_700_000_000_000)
    with JournaledQueue(tmp_path, "orders", codec=codec, clock=clock) as queue:
        queue.put(FIRST, expires_in=5)
        queue.put_many([SECOND, SECOND], expires_in=10)
        clock.advance(6)
        assert queue.get_nowait().value == SECOND
        clock.advance(6)
        with pytest.raises(QueueEmpty):
            queue.get_nowait()


@every_codec
def test_another_process_reads_and_publishes(codec: Codec[Order], tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "orders", codec=codec, inbox_interval=None) as queue:
        queue.put(FIRST)
        with PartWriter(tmp_path, "orders") as writer:
            writer.add([codec.encode(SECOND)])
            publish(tmp_path, "orders", [writer.seal()])
        queue.take_in()
        reader = open_reader(tmp_path, "orders", "mail", create=True, codec=codec)
        try:
            assert [reader.get(timeout=10).value for _ in range(2)] == [FIRST, SECOND]
        finally:
            reader.close()
    assert [codec.decode(record.data) for record in scan(tmp_path, "orders")] == [FIRST, SECOND]


def test_what_is_on_disk_is_encrypted(tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "texts", codec=codecs.encrypted(KEYS, JSON)) as queue:
        queue.put("a word that is not to be read")
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"not to be read" not in stored
    assert b"new" in stored


def test_a_dead_letter_does_not_quote_what_is_encrypted(tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "texts", codec=codecs.encrypted(KEYS, JSON)) as queue:
        queue.put({"article": "not to be read", "count": "not a number"})
    config = ReaderConfig(max_deliveries=1, dead_letter="dead")
    codec = codecs.encrypted(KEYS, codecs.pydantic(Order))
    with JournaledQueue(tmp_path, "texts", codec=codec, default_reader=config) as queue:
        with pytest.raises(DecodeError) as caught, queue.get() as item:
            assert item.value
        assert "not a number" in str(caught.value.__cause__)
    with dead_letters(tmp_path, "dead") as letters:
        assert ["ValidationError" in letter.reason or "DecodeError" in letter.reason for letter in letters] == [True]
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"not to be read" not in stored
    assert b"not a number" not in stored


def test_a_key_that_is_gone_loses_no_item(tmp_path: Path) -> None:
    """The item is got, its value is an error, and it comes again to who has the key."""
    with JournaledQueue(tmp_path, "texts", codec=codecs.encrypted(KEYS, JSON)) as queue:
        queue.put("kept")
    with JournaledQueue(tmp_path, "texts", codec=codecs.encrypted({"other": KEYS["new"]}, JSON)) as queue:
        with pytest.raises(WrongKey, match="'new'"), queue.get() as item:
            print(item.value)
        face = queue.as_blocking_queue()
        with pytest.raises(WrongKey, match="'new'"):
            face.get()
    with JournaledQueue(tmp_path, "texts", codec=codecs.encrypted(KEYS, JSON)) as queue:
        item = queue.get()
        assert (item.value, item.error_count) == ("kept", 2)


def test_another_codec_than_the_queue_was_written_with(tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "texts", codec=JSON) as queue:
        queue.put({"a": 1})
    for name, codec in CODECS.items():
        with JournaledQueue(tmp_path, "texts", codec=codec) as queue, pytest.raises(DecodeError):
            assert queue.get().value is None, name


def test_an_item_is_not_bound_to_its_place(tmp_path: Path) -> None:
    """Bytes of one queue are an item of another one with the same key: docs/security.md says so."""
    codec = codecs.encrypted(KEYS, JSON)
    with JournaledQueue(tmp_path, "one", codec=codec) as one, JournaledQueue(tmp_path, "two") as two:
        one.put("apples")
        two.put(one.get().data)
    with JournaledQueue(tmp_path, "two", codec=codec) as two:
        assert two.get().value == "apples"
