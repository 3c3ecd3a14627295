"""Codecs for ``JournaledQueue(codec=...)``: they turn values into the bytes of an item, and back. None of them
unpickles.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["JSON", "UTF8"]


class _Json:
    """JSON values, as compact UTF-8 text. Raises ``TypeError`` for other values, ``ValueError`` for bytes that are not
    JSON.
    """

    def encode(self, value: Any) -> bytes:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")

    def decode(self, data: bytes) -> Any:
        return json.loads(data)


class _Utf8:
    """Strings, as UTF-8. Raises ``TypeError`` for other values, ``UnicodeDecodeError`` for bytes that are not UTF-8."""

    def encode(self, value: Any) -> bytes:
        if not isinstance(value, str):
            raise TypeError(f"the UTF8 codec takes str, not {type(value).__name__}")
        return value.encode("utf-8")

    def decode(self, data: bytes) -> str:
        return data.decode("utf-8")


JSON = _Json()
UTF8 = _Utf8()
