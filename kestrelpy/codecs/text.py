"""``JSON`` and ``UTF8``: the codecs that need nothing but the standard library."""

from __future__ import annotations

import json
from typing import Any

from kestrelpy.codecs.errors import DecodeError

__all__ = ["JSON", "UTF8"]


class _Json:
    """JSON values, as compact UTF-8 text. Raises ``TypeError`` for other values, ``ValueError`` for bytes that are not
    JSON, and for what is nested too deeply.
    """

    def encode(self, value: Any) -> bytes:
        try:
            return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
        except RecursionError:
            raise ValueError("this value is nested too deeply for JSON") from None

    def decode(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except RecursionError:
            raise DecodeError("this JSON is nested too deeply") from None


class _Utf8:
    """Strings, as UTF-8. Raises ``TypeError`` for other values, ``UnicodeDecodeError`` for bytes that are not UTF-8."""

    def encode(self, value: str) -> bytes:
        if not isinstance(value, str):
            raise TypeError(f"the UTF8 codec takes str, not {type(value).__name__}")
        return value.encode("utf-8")

    def decode(self, data: bytes) -> str:
        return data.decode("utf-8")


JSON = _Json()
UTF8 = _Utf8()
