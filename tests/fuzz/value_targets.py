"""What the codecs of values are fuzzed with: each target takes any bytes; any error but ``DecodeError`` breaks it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import re
from collections.abc import Callable
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kestrelpy import codecs
from kestrelpy.config import Codec
from kestrelpy.logging.records import decode_record, encode_record

KEY = bytes(range(16))
NONCE = bytes(12)
MOST_BYTES = 4096
FORMATTER = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(lineno)d %(process)s %(message)s")


@dataclasses.dataclass
class Shape:
    """A value with parts of every kind."""

    name: str
    sizes: list[int]
    parts: dict[str, float | None]
    inner: Shape | None = None


def comes_back(codec: Codec[Any], data: bytes) -> Any:
    """The value of ``data``, which is encoded and decoded once more, or ``DecodeError``."""
    value = codec.decode(data)
    with contextlib.suppress(ValueError):
        assert codec.decode(codec.encode(value)) == value or re.search("inf|nan", repr(value))  # JSON has only null
    return value


def msgspec_json(data: bytes) -> None:
    with contextlib.suppress(codecs.DecodeError):
        assert isinstance(comes_back(codecs.msgspec(Shape), data), Shape)


def msgspec_msgpack(data: bytes) -> None:
    with contextlib.suppress(codecs.DecodeError):
        assert isinstance(comes_back(codecs.msgspec(Shape, "msgpack"), data), Shape)


def pydantic_json(data: bytes) -> None:
    with contextlib.suppress(codecs.DecodeError):
        assert isinstance(comes_back(codecs.pydantic(Shape), data), Shape)


def zstd_frame(data: bytes) -> None:
    """As it is, and as what follows the magic of a frame."""
    codec = codecs.zstd(max_decoded_bytes=MOST_BYTES)
    for each in (data, b"\x28\xb5\x2f\xfd" + data):
        with contextlib.suppress(codecs.DecodeError):
            assert len(comes_back(codec, each)) <= MOST_BYTES


def encrypted_item(data: bytes) -> None:
    """Nobody makes an item without the key. The corpus has one that was made with it."""
    codec = codecs.encrypted({"k": KEY, "other": KEY[::-1]})
    with contextlib.suppress(codecs.DecodeError):
        assert comes_back(codec, data) == b"apples"


def sealed_encrypted_item(data: bytes) -> None:
    """The first byte is the length of a head of any bytes, to which the item is bound with the right key."""
    head, body = data[1 : 1 + data[0]] if data else b"", b"apples"
    made = head + NONCE + AESGCM(KEY).encrypt(NONCE, body, head)
    try:
        found = codecs.encrypted({"k": KEY, "long id": KEY, "k2": KEY[::-1]}).decode(made)
    except codecs.DecodeError:
        assert head not in (b"\xce\1\1k", b"\xce\1\7long id")
    else:
        assert (found, head) in ((body, b"\xce\1\1k"), (body, b"\xce\1\7long id"))


def log_record(data: bytes) -> None:
    """A handler can show what is decoded, and it says what is in the bytes."""
    with contextlib.suppress(codecs.DecodeError):
        found = decode_record(data)
        assert found.getMessage() == json.loads(data)["message"]
        shown = FORMATTER.format(found)
        assert FORMATTER.format(decode_record(encode_record(found))) == shown


VALUE_TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        msgspec_json,
        msgspec_msgpack,
        pydantic_json,
        zstd_frame,
        encrypted_item,
        sealed_encrypted_item,
        log_record,
    )
}
