"""``kestrelpy.codecs.zstd``: one frame of Zstandard (RFC 8878) an item, with its checksum.

What is decoded is bounded. A frame may claim a size, or not, and a few bytes may stand for gigabytes: so the output is
made up to the bound and no further, and a frame that asks for a larger window than the bound is refused before it gets
one. A window of 8 MiB is always allowed, which is what the RFC recommends to support.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kestrelpy._checks import check_whole
from kestrelpy.codecs.errors import DecodeError
from kestrelpy.codecs.inner import check_inner, inner_bytes

if TYPE_CHECKING:
    from kestrelpy.config import Codec

_LEAST_WINDOW_LOG, _MOST_WINDOW_LOG = 23, 31


class ZstdCodec:
    """``kestrelpy.codecs.zstd``. Thread-safe."""

    def __init__(self, inner: Codec | None, level: int, max_decoded_bytes: int) -> None:
        self._inner = check_inner(inner, "zstd")
        max_decoded_bytes = check_whole("max_decoded_bytes", max_decoded_bytes, 1)
        level = check_whole("level", level, None)
        self._zstd = zstd = _module()
        least, most = zstd.CompressionParameter.compression_level.bounds()
        if not least <= level <= most:
            raise ValueError(f"level must be from {least} to {most}, not {level!r}")
        self._most = min(max_decoded_bytes, sys.maxsize - 1)  # nothing larger is in any memory
        self._packing = {
            zstd.CompressionParameter.compression_level: level,
            zstd.CompressionParameter.checksum_flag: 1,
        }
        window_log = min(max(max_decoded_bytes.bit_length(), _LEAST_WINDOW_LOG), _MOST_WINDOW_LOG)
        self._unpacking = {zstd.DecompressionParameter.window_log_max: window_log}

    def encode(self, value: Any) -> bytes:
        """The frame of ``value``. Raises ``ValueError`` for one that would not be decoded, and the inner errors."""
        data = inner_bytes(self._inner, value, "zstd")
        if len(data) > self._most:
            raise ValueError(f"a value of {len(data):,} bytes is larger than max_decoded_bytes={self._most:,}")
        packed: bytes = self._zstd.compress(data, options=self._packing)
        return packed

    def decode(self, data: bytes) -> Any:
        """The value of the frame ``data``. Raises ``DecodeError``, and what the inner codec raises."""
        unpacked = self._unpacked(data)
        return unpacked if self._inner is None else self._inner.decode(unpacked)

    def _unpacked(self, data: bytes) -> bytes:
        frame = self._zstd.ZstdDecompressor(options=self._unpacking)
        try:
            unpacked: bytes = frame.decompress(data, self._most + 1)
        except self._zstd.ZstdError as error:
            raise DecodeError(f"not a frame of zstd: {error}") from error
        if len(unpacked) > self._most:
            raise DecodeError(f"a frame of zstd has more than max_decoded_bytes={self._most:,}")
        if not frame.eof:
            raise DecodeError("a frame of zstd is cut short")
        if frame.unused_data:
            raise DecodeError(f"{len(frame.unused_data):,} bytes follow the frame of zstd")
        return unpacked

    def __repr__(self) -> str:
        return f"<codecs.zstd: {'bytes' if self._inner is None else self._inner!r}>"


def _module() -> Any:
    """``compression.zstd`` of Python 3.14, or the same from PyPI."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError as missing:
        raise ImportError(
            "codecs.zstd() needs Python 3.14, or the package backports.zstd: pip install 'kestrelpy[zstd]'"
        ) from missing
    return zstd
