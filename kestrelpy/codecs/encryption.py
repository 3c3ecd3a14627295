"""``kestrelpy.codecs.encrypted``: items that only the holder of a key can read, or could have made.

An encrypted item, integers of one byte:

    | mark 0xCE | version 1 | length of the key id | key id [length] | nonce [12] | ciphertext | tag [16] |

AES-GCM (NIST SP 800-38D), with all that stands before the nonce as associated data: nobody without the key can make an
item of one key id or version look like one of another. The nonce is random, so one key is good for 2**32 items.

Rules:
1. No key is kept but inside the cipher's object. It is in no ``repr``, error, log or pickle.
2. An error names a key's id, and nothing else of the item: its text may become the reason of a dead letter, which is
   stored as it is. What the inner codec says is the error's cause.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from kestrelpy.codecs.errors import DecodeError, WrongKey
from kestrelpy.codecs.inner import check_inner, inner_bytes

if TYPE_CHECKING:
    from kestrelpy.config import Codec

MARK = 0xCE
VERSION = 1
NONCE_BYTES = 12
TAG_BYTES = 16
MAX_KEY_ID_BYTES = 255
KEY_SIZES = (16, 24, 32)


class EncryptedCodec:
    """``kestrelpy.codecs.encrypted``. Thread-safe."""

    def __init__(self, keys: Mapping[str, bytes], inner: Codec | None) -> None:
        self._inner = check_inner(inner, "encrypted")
        if not isinstance(keys, Mapping):
            raise TypeError(f"keys must be a mapping of key ids to keys, not {type(keys).__name__}")
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as missing:
            raise ImportError(
                "codecs.encrypted() needs the package cryptography: pip install 'kestrelpy[encrypted]'"
            ) from missing
        self._invalid = InvalidTag
        self._ciphers: dict[bytes, AESGCM] = {}
        for key_id, key in keys.items():
            name = _encoded_id(key_id)
            if not isinstance(key, bytes | bytearray | memoryview):
                raise TypeError(f"key {key_id!r} must be bytes, not {type(key).__name__}")
            if len(key) not in KEY_SIZES:
                raise ValueError(f"key {key_id!r} has {len(key)} bytes, not 16, 24 or 32")
            self._ciphers[name] = AESGCM(bytes(key))
        if not self._ciphers:
            raise ValueError("keys must have at least one key: the first one encrypts")
        first = next(iter(self._ciphers))
        self._head = bytes((MARK, VERSION, len(first))) + first
        self._cipher = self._ciphers[first]

    def encode(self, value: Any) -> bytes:
        """``value``, encrypted with the first key. Raises ``TypeError``, and what the inner codec raises."""
        data = inner_bytes(self._inner, value, "encrypted")
        nonce = os.urandom(NONCE_BYTES)
        return b"".join((self._head, nonce, self._cipher.encrypt(nonce, data, self._head)))

    def decode(self, data: bytes) -> Any:
        """The value of ``data``. Raises ``WrongKey``, ``DecodeError``."""
        opened = self._opened(data)
        if self._inner is None:
            return opened
        try:
            return self._inner.decode(opened)
        except (WrongKey, MemoryError):  # WrongKey: of an inner codec that encrypts, too
            raise
        except Exception as error:
            what = f"the inner codec {type(self._inner).__name__} can't decode it: {type(error).__name__}"
            raise DecodeError(f"an item is decrypted, and {what}") from error

    def _opened(self, data: bytes) -> bytes:
        if len(data) < 3 or data[0] != MARK:
            raise DecodeError("not an encrypted item")
        if data[1] != VERSION:
            raise DecodeError(f"an encrypted item of version {data[1]}, and this release knows version {VERSION}")
        end = 3 + data[2]
        if len(data) < end + NONCE_BYTES + TAG_BYTES:
            raise DecodeError("an encrypted item is cut short")
        name, body = data[3:end], end + NONCE_BYTES
        cipher = self._ciphers.get(name)
        try:
            key_id = name.decode("utf-8")
        except UnicodeDecodeError:
            raise DecodeError("an encrypted item has a key id that is not UTF-8") from None
        if cipher is None:
            raise WrongKey(key_id, is_known=False)
        try:
            return cipher.decrypt(data[end:body], data[body:], data[:end])
        except self._invalid:
            raise WrongKey(key_id, is_known=True) from None

    def __reduce__(self) -> NoReturn:
        raise TypeError("a codec with keys is not pickled or copied: make it in the process that uses it")

    def __repr__(self) -> str:
        ids = ", ".join(repr(name.decode("utf-8")) for name in self._ciphers)
        return f"<codecs.encrypted: {'bytes' if self._inner is None else self._inner!r}, keys {ids}>"


def _encoded_id(key_id: str) -> bytes:
    if not isinstance(key_id, str):
        raise TypeError(f"a key id must be a str, not {type(key_id).__name__}")
    try:
        name = key_id.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("a key id must not have a lone surrogate") from None
    if not 1 <= len(name) <= MAX_KEY_ID_BYTES:
        raise ValueError(f"a key id has 1 to {MAX_KEY_ID_BYTES} bytes in UTF-8, not {len(name)}")
    return name
