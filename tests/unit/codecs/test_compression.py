"""``codecs.zstd``: frames in, values out, and never more than the bound."""

from __future__ import annotations

import contextlib
import sys
import tracemalloc
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrelpy import codecs
from kestrelpy.codecs import JSON, UTF8, compression

try:
    module: Any = compression._module()
except ImportError:
    pytest.skip("backports.zstd is not installed: the extra [dev] has it", allow_module_level=True)

MIB = 1 << 20


def streamed(data: bytes, **options: int) -> bytes:
    """A frame that does not name its size."""
    chosen = {getattr(module.CompressionParameter, name): value for name, value in options.items()}
    packer = module.ZstdCompressor(options=chosen)
    whole: bytes = packer.compress(data) + packer.flush()
    assert module.get_frame_info(whole).decompressed_size is None
    return whole


@given(st.binary(max_size=4096), st.integers(-5, 9))
def test_round_trip(data: bytes, level: int) -> None:
    codec = codecs.zstd(level=level)
    assert codec.decode(codec.encode(data)) == data


@given(st.text())
def test_round_trip_of_an_inner_codec(text: str) -> None:
    codec = codecs.zstd(UTF8)
    assert codec.decode(codec.encode(text)) == text


def test_bytes_like_values_are_bytes() -> None:
    codec = codecs.zstd()
    for value in (bytearray(b"abc"), memoryview(b"abc")):
        assert codec.decode(codec.encode(value)) == b"abc"  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"takes bytes, not str.*inner codec"):
        codec.encode("abc")  # type: ignore[arg-type]


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_a_decode_error(data: bytes) -> None:
    codec = codecs.zstd(max_decoded_bytes=1000)
    for each in (data, b"\x28\xb5\x2f\xfd" + data):
        with contextlib.suppress(codecs.DecodeError):
            assert len(codec.decode(each)) <= 1000


def test_every_damage_is_found() -> None:
    """By the frame's checksum: a byte that is changed gives an error, or changes nothing."""
    codec = codecs.zstd()
    value = bytes(range(256)) * 3
    whole = codec.encode(value)
    found = 0
    for at in range(len(whole)):
        for flip in (1, 0x10, 0xFF):
            damaged = bytearray(whole)
            damaged[at] ^= flip
            try:
                assert codec.decode(bytes(damaged)) == value
            except codecs.DecodeError:
                found += 1
    assert found > 2 * len(whole)
    for end in range(len(whole)):
        with pytest.raises(codecs.DecodeError):
            codec.decode(whole[:end])


@pytest.mark.parametrize("data", [b"", b"x", JSON.encode({"a": 1}), b"\xce\x01\x01a" + bytes(40)])
def test_bytes_of_another_codec(data: bytes) -> None:
    with pytest.raises(codecs.DecodeError):
        codecs.zstd().decode(data)


def test_what_follows_the_frame_is_an_error() -> None:
    whole = codecs.zstd().encode(b"one")
    with pytest.raises(codecs.DecodeError, match="bytes follow"):
        codecs.zstd().decode(whole + whole)


@pytest.mark.parametrize("frame", ["sized", "streamed"])
def test_a_bomb_is_not_decoded(frame: str) -> None:
    """Of 64 MiB that are a few kilobytes no more is made than the bound, and a little for the window."""
    zeros = bytes(64 * MIB)
    bomb = module.compress(zeros) if frame == "sized" else streamed(zeros)
    del zeros
    assert len(bomb) < 16_000
    codec = codecs.zstd(max_decoded_bytes=MIB)
    tracemalloc.start()
    try:
        with pytest.raises(codecs.DecodeError, match="max_decoded_bytes=1,048,576"):
            codec.decode(bomb)
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()
    assert codecs.zstd().decode(bomb) == bytes(64 * MIB)


def test_a_window_that_is_larger_than_the_bound_is_refused() -> None:
    """The window is memory, too, and a frame asks for it before it has a single byte."""
    wide = streamed(bytes(1000), window_log=27)
    with pytest.raises(codecs.DecodeError, match="memory"):
        codecs.zstd(max_decoded_bytes=MIB).decode(wide)
    assert codecs.zstd(max_decoded_bytes=1000).decode(streamed(bytes(1000), window_log=23)) == bytes(1000)


def test_the_bound_itself_is_fine_and_more_is_not_stored() -> None:
    codec = codecs.zstd(max_decoded_bytes=1000)
    assert codec.decode(codec.encode(bytes(1000))) == bytes(1000)
    assert codec.decode(streamed(bytes(1000))) == bytes(1000)
    with pytest.raises(ValueError, match="max_decoded_bytes=1,000"):
        codec.encode(bytes(1001))
    for frame in (module.compress(bytes(1001)), streamed(bytes(1001))):
        with pytest.raises(codecs.DecodeError, match="max_decoded_bytes=1,000"):
            codec.decode(frame)


def test_a_decoder_without_the_bound_is_caught() -> None:
    """The tests above see what they are for."""
    codec = codecs.zstd(max_decoded_bytes=1000)
    with mock.patch.object(codec, "_most", 1 << 40):
        assert len(codec.decode(module.compress(bytes(1001)))) == 1001


def test_options_out_of_range() -> None:
    with pytest.raises(ValueError, match="level"):
        codecs.zstd(level=99)
    with pytest.raises(ValueError, match="max_decoded_bytes"):
        codecs.zstd(max_decoded_bytes=0)
    with pytest.raises(TypeError, match="max_decoded_bytes"):
        codecs.zstd(max_decoded_bytes=1.5)  # type: ignore[call-overload]
    for level in (1.5, "3", None, True):
        with pytest.raises(TypeError, match="level must be a whole number"):
            codecs.zstd(level=level)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="inner codec"):
        codecs.zstd(7)  # type: ignore[call-overload]


@pytest.mark.parametrize("most", [sys.maxsize - 1, sys.maxsize, sys.maxsize + 1, 10**30])
def test_no_bound_is_too_high_to_decode(most: int) -> None:
    codec = codecs.zstd(max_decoded_bytes=most)
    assert codec.decode(codec.encode(b"x")) == b"x"


def test_an_inner_codec_that_makes_no_bytes() -> None:
    broken = mock.Mock()
    broken.encode.return_value = "text"
    with pytest.raises(TypeError, match="str, which its inner codec made"):
        codecs.zstd(broken).encode(1)


def test_without_the_package() -> None:
    package = {"compression": None, "backports": None, "backports.zstd": None}
    with mock.patch.dict(sys.modules, package), pytest.raises(ImportError, match=r"kestrelpy\[zstd\]"):
        codecs.zstd()
