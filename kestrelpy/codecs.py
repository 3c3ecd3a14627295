"""Codecs for ``JournaledQueue(codec=...)``: how values become the bytes of an item and come back. Nothing here
unpickles.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["JSON", "UTF8"]


class _Json:
    """Values of JSON, as compact UTF-8 text. Raises ``TypeError`` for other values, ``ValueError`` for bytes that are
    no JSON.
    """

    def encode(self, value: Any) -> bytes:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")

    def decode(self, data: bytes) -> Any:
        return json.loads(data)


class _Utf8:
    """Strings, as UTF-8. Raises ``TypeError`` for other values, ``UnicodeDecodeError`` for bytes that are no UTF-8."""

    def encode(self, value: Any) -> bytes:
        if not isinstance(value, str):
            raise TypeError(f"the UTF8 codec takes str, not {type(value).__name__}")
        return value.encode("utf-8")

    def decode(self, data: bytes) -> str:
        return data.decode("utf-8")


JSON = _Json()
UTF8 = _Utf8()
