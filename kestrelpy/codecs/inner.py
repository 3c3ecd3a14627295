"""A codec around another one: it turns the bytes of the inner codec into other bytes, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kestrelpy.config import Codec


def check_inner(inner: Codec | None, name: str) -> Codec | None:
    """``inner``, if it is a codec or ``None``. Raises ``TypeError``."""
    if inner is not None and not (
        callable(getattr(inner, "encode", None)) and callable(getattr(inner, "decode", None))
    ):
        raise TypeError(f"{name}(): the inner codec must have encode() and decode(), and {inner!r} does not")
    return inner


def inner_bytes(inner: Codec | None, value: Any, name: str) -> bytes:
    """The bytes of ``value`` by the inner codec. Raises ``TypeError``, and what the inner codec raises."""
    data: object = value if inner is None else inner.encode(value)
    if isinstance(data, bytes):
        return data
    if isinstance(data, bytearray | memoryview):
        return bytes(data)
    hint = f": for other values, give {name}() an inner codec" if inner is None else ", which its inner codec made"
    raise TypeError(f"{name}() takes bytes, not {type(data).__name__}{hint}")
