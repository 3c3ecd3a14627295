"""The local files of shipping with one body and its checksum: ``jobs.ship`` and ``jobs.lazy``.

docs/format.md is the specification:  | magic 8 | version 2 | 0 6 | crc 4 | length 4 | body [length] |
"""

from __future__ import annotations

import struct
from typing import NamedTuple
from zlib import crc32

from kestrelpy._disk.interface import Directory
from kestrelpy._journal.small_files import read_small
from kestrelpy.errors import UnsupportedFormat

_PREFIX = struct.Struct("<8sH6s")
_RECORD = struct.Struct("<II")
_UNUSED = bytes(6)
_BODY_AT = _PREFIX.size + _RECORD.size


class FramedFormat(NamedTuple):
    """One of these formats. ``most_bytes``: of a body."""

    magic: bytes
    version: int
    most_bytes: int

    def encode(self, body: bytes) -> bytes:
        """The whole file."""
        return _PREFIX.pack(self.magic, self.version, _UNUSED) + _RECORD.pack(crc32(body), len(body)) + body

    def body_of(self, data: bytes) -> bytes | None:
        """The body, if ``data`` is exactly one file of this version."""
        body = data[_BODY_AT:]
        if len(data) < _BODY_AT or _PREFIX.unpack_from(data) != (self.magic, self.version, _UNUSED):
            return None
        return body if _RECORD.unpack_from(data, _PREFIX.size) == (crc32(body), len(body)) else None

    def read(self, folder: Directory, name: str) -> bytes | None:
        """What the file has, whole or not; ``None`` if it is not there. Raises ``UnsupportedFormat`` for another
        version, and ``OSError``.
        """
        data = read_small(folder, name, _BODY_AT + self.most_bytes)
        if data is not None and data[:8] == self.magic and len(data) >= _PREFIX.size:
            version = int(_PREFIX.unpack_from(data)[1])
            if version != self.version:
                raise UnsupportedFormat(f"{folder.path}/{name}", version, self.version)
        return data
