"""Codecs for ``JournaledQueue(codec=...)``: they turn values into the bytes of an item, and back. None of them
unpickles.

``JSON`` and ``UTF8`` need nothing else. ``msgspec`` and ``pydantic`` decode into a type that you declare, and check it.
``zstd`` compresses and ``encrypted`` encrypts, what another codec makes or bytes. Each needs the package that the extra
of its name installs: ``pip install 'kestrelpy[zstd]'``; ``[codecs]`` installs all of them. A codec is thread-safe.

    codec = encrypted({"2027": new_key, "2026": old_key}, zstd(msgspec(Order)))
    with JournaledQueue("queues", "orders", codec=codec) as queue:
        queue.put(Order(7, "apples"))
        order = queue.get().value

Bytes that a codec can't decode are a ``DecodeError``, which is a ``ValueError``; ``JSON`` and ``UTF8`` raise other
kinds of ``ValueError``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from kestrelpy.codecs.errors import DecodeError, WrongKey
from kestrelpy.codecs.text import JSON, UTF8

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kestrelpy.config import Codec
    from kestrelpy.item import V

__all__ = ["JSON", "UTF8", "DecodeError", "WrongKey", "encrypted", "msgspec", "pydantic", "zstd"]


@overload
def msgspec(type: type[V], format: Literal["json", "msgpack"] = "json") -> Codec[V]: ...


@overload
def msgspec(type: Any, format: Literal["json", "msgpack"] = "json") -> Codec[Any]: ...


def msgspec(type: Any, format: Literal["json", "msgpack"] = "json") -> Codec[Any]:
    """Values of ``type``, which is all that the package msgspec knows: a ``Struct``, a dataclass, ``list[int]``, ...

    ``format`` is ``"json"``, or ``"msgpack"``, which is shorter. ``decode`` checks the type: bytes that do not fit are
    a ``DecodeError``. ``encode`` does not check it (a type checker does), and raises ``TypeError`` or ``ValueError``
    for a value that has no such bytes. JSON has no infinite float, and msgspec writes null for one; ``"msgpack"`` has
    them. Raises ``ImportError`` without msgspec.
    """
    from kestrelpy.codecs.schemas import MsgspecCodec

    return MsgspecCodec(type, format)


@overload
def pydantic(model: type[V]) -> Codec[V]: ...


@overload
def pydantic(model: Any) -> Codec[Any]: ...


def pydantic(model: Any) -> Codec[Any]:
    """Values of ``model``, as JSON: a ``BaseModel``, or any other type that the package pydantic knows.

    ``decode`` checks the model, and raises ``DecodeError``. ``encode`` raises ``ValueError`` for a value that does not
    fit the model, and writes fields by their names; ``decode`` takes names and aliases. An infinite float is null,
    unless the model's ``ser_json_inf_nan`` is ``"constants"``. Raises ``ImportError`` without pydantic 2.11 or newer.
    """
    from kestrelpy.codecs.schemas import PydanticCodec

    return PydanticCodec(model)


@overload
def zstd(inner: None = None, level: int = 1, *, max_decoded_bytes: int = 64 << 20) -> Codec[bytes]: ...


@overload
def zstd(inner: Codec[V], level: int = 1, *, max_decoded_bytes: int = 64 << 20) -> Codec[V]: ...


def zstd(inner: Codec | None = None, level: int = 1, *, max_decoded_bytes: int = 64 << 20) -> Codec[Any]:
    """What ``inner`` makes (or bytes), compressed by Zstandard: one frame an item, with a checksum.

    ``level`` goes up to 22: higher is smaller and slower. Nothing of more than ``max_decoded_bytes`` is decoded
    (``DecodeError``), however few bytes stand for it, or encoded (``ValueError``). A frame of another program is
    decoded, too, also one that does not name its size. Raises ``ImportError`` without Python 3.14 or backports.zstd.
    """
    from kestrelpy.codecs.compression import ZstdCodec

    return ZstdCodec(inner, level, max_decoded_bytes)


@overload
def encrypted(keys: Mapping[str, bytes], inner: None = None) -> Codec[bytes]: ...


@overload
def encrypted(keys: Mapping[str, bytes], inner: Codec[V]) -> Codec[V]: ...


def encrypted(keys: Mapping[str, bytes], inner: Codec | None = None) -> Codec[Any]:
    """What ``inner`` makes (or bytes), encrypted by AES-GCM: who has no key reads nothing, and forges nothing.

    ``keys``: keys of 16, 24 or 32 random bytes (``os.urandom(32)``), each by its id, a string of up to 255 bytes. The
    first key encrypts; all decrypt. To change the key, put a new one first and keep the old ones for as long as there
    are items of them. An item shows its key's id, and how long it is, to everybody. One key is good for four billion
    items, as nonces are random. To compress as well, compress first: ``encrypted(keys, zstd())``.

    ``decode`` raises ``WrongKey`` for a key that is not known or does not fit, and ``DecodeError``. What ``inner``
    raises is the cause of a ``DecodeError``, whose text has nothing of the item. The codec is not pickled. Raises
    ``ImportError`` without the package cryptography. The layout is in docs/format.md.
    """
    from kestrelpy.codecs.encryption import EncryptedCodec

    return EncryptedCodec(keys, inner)
