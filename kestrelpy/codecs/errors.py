"""What the codecs raise for bytes that they can't decode."""

from __future__ import annotations

from kestrelpy.errors import KestrelError

__all__ = ["DecodeError", "WrongKey"]


class DecodeError(KestrelError, ValueError):
    """These bytes are not what the codec has encoded: they are damaged, cut short, or those of another codec."""


class WrongKey(DecodeError):
    """The item is encrypted with the key ``key_id``, which the codec does not have, or which does not fit. A key that
    does not fit can't be told from a damaged item.
    """

    def __init__(self, key_id: str, *, is_known: bool) -> None:
        why = "does not fit" if is_known else "is not known"
        super().__init__(f"key {key_id!r} {why}")
        self.key_id = key_id
