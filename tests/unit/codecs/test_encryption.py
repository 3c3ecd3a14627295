"""``codecs.encrypted``: only who has the key reads or makes an item, and no key is shown anywhere."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import sys
import traceback
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrelpy import JournaledQueue, codecs
from kestrelpy.codecs import JSON, UTF8, DecodeError, WrongKey, encryption
from kestrelpy.testing import MemoryDisk

aead = pytest.importorskip(
    "cryptography.hazmat.primitives.ciphers.aead", reason="cryptography is not installed: the extra [dev] has it"
)

OLD = bytes(range(32))
NEW = b"a key of 32 bytes, of which none"
SIZES = (16, 24, 32)


@given(st.binary(max_size=1000), st.sampled_from(SIZES))
def test_round_trip(data: bytes, size: int) -> None:
    codec = codecs.encrypted({"k": OLD[:size]})
    whole = codec.encode(data)
    assert codec.decode(whole) == data
    assert len(whole) == len(data) + 3 + 1 + 12 + 16


@given(st.text())
def test_round_trip_of_an_inner_codec(text: str) -> None:
    codec = codecs.encrypted({"k": OLD}, UTF8)
    assert codec.decode(codec.encode(text)) == text


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60))
def test_any_key_id(key_id: str) -> None:
    codec = codecs.encrypted({key_id: OLD})
    assert codec.decode(codec.encode(b"x")) == b"x"
    with pytest.raises(WrongKey) as caught:
        codecs.encrypted({key_id + "2": OLD}).decode(codec.encode(b"x"))
    assert caught.value.key_id == key_id


def test_rotation() -> None:
    before = codecs.encrypted({"old": OLD})
    after = codecs.encrypted({"new": NEW, "old": OLD})
    end = codecs.encrypted({"new": NEW})
    item = before.encode(b"apples")
    assert after.decode(item) == b"apples"
    fresh = after.encode(b"pears")
    assert end.decode(fresh) == b"pears"
    with pytest.raises(WrongKey, match=r"^key 'old' is not known$") as caught:
        end.decode(item)
    assert caught.value.key_id == "old"
    assert isinstance(caught.value, ValueError)


def test_nonces_are_random_and_of_96_bits() -> None:
    codec = codecs.encrypted({"k": OLD})
    nonces = {codec.encode(b"same")[4:16] for _ in range(1000)}
    assert len(nonces) == 1000
    with mock.patch.object(encryption.os, "urandom", return_value=bytes(12)) as drawn:
        assert codec.encode(b"same") == codec.encode(b"same")
    drawn.assert_called_with(12)


def test_a_wrong_key_names_its_id_and_nothing_else() -> None:
    item = codecs.encrypted({"k": OLD}).encode(b"apples")
    with pytest.raises(WrongKey, match=r"^key 'k' does not fit$") as caught:
        codecs.encrypted({"k": NEW}).decode(item)
    assert caught.value.__cause__ is None
    assert vars(caught.value) == {"key_id": "k"}
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.args, again.key_id) == (caught.value.args, "k")


def test_every_damage_and_every_cut_is_found() -> None:
    codec = codecs.encrypted({"k": OLD, "j": OLD})
    whole = codec.encode(b"apples")
    for at in range(len(whole)):
        for flip in range(1, 256):
            damaged = bytearray(whole)
            damaged[at] ^= flip
            with pytest.raises(DecodeError):
                codec.decode(bytes(damaged))
    for data in (*(whole[:end] for end in range(len(whole))), whole + b"x"):
        with pytest.raises(DecodeError):
            codec.decode(data)


def test_the_key_id_and_the_version_are_bound() -> None:
    """The same key under two ids: an item of one is not taken for one of the other."""
    item = codecs.encrypted({"k": OLD}).encode(b"apples")
    both = codecs.encrypted({"j": OLD, "k": OLD})
    with pytest.raises(WrongKey, match="'j'"):
        both.decode(item.replace(b"k", b"j", 1))
    with pytest.raises(DecodeError, match="version 2"):
        both.decode(item[:1] + b"\2" + item[2:])
    with mock.patch.object(encryption, "VERSION", 2), pytest.raises(WrongKey, match="'k'"):
        both.decode(item[:1] + b"\2" + item[2:])


def test_without_the_binding_an_item_could_be_renamed() -> None:
    """The test above sees what it is for: this is how a codec without associated data would behave."""
    cipher = aead.AESGCM(OLD)
    made = b"\xce\1\1k" + bytes(12) + cipher.encrypt(bytes(12), b"apples", b"")
    assert cipher.decrypt(made[4:16], made[16:], b"") == b"apples"
    with pytest.raises(WrongKey):
        codecs.encrypted({"k": OLD}).decode(made)


@given(st.binary(max_size=80))
def test_any_bytes_are_a_decode_error(data: bytes) -> None:
    codec = codecs.encrypted({"k": OLD}, JSON)
    for each in (data, b"\xce\1" + data, b"\xce\1\1k" + data):
        with pytest.raises(DecodeError):
            codec.decode(each)


@pytest.mark.parametrize("inner", [JSON, UTF8, codecs.encrypted({"other": NEW}), mock.Mock()])
def test_an_error_of_the_inner_codec_shows_nothing_of_the_item(inner: Any) -> None:
    if isinstance(inner, mock.Mock):
        inner.decode.side_effect = lambda data: {}[data]
    with pytest.raises(DecodeError) as caught:
        codecs.encrypted({"k": OLD}, inner).decode(codecs.encrypted({"k": OLD}).encode(b"\xcesecret\xff"))
    assert "secret" not in str(caught.value)
    if inner is JSON:
        assert isinstance(caught.value.__cause__, UnicodeDecodeError)
        assert "UnicodeDecodeError" in str(caught.value)


def test_a_wrong_key_of_an_inner_codec_is_one() -> None:
    twice = codecs.encrypted({"k": OLD}, codecs.encrypted({"k": OLD})).encode(b"")
    with pytest.raises(WrongKey, match="'k' is not known"):
        codecs.encrypted({"k": OLD}, codecs.encrypted({"other": NEW})).decode(twice)


@pytest.mark.parametrize("data", [b"", b"{}", b"\x28\xb5\x2f\xfd" + bytes(30), b"\xce\1\1\xff" + bytes(28)])
def test_bytes_of_another_codec(data: bytes) -> None:
    with pytest.raises(DecodeError):
        codecs.encrypted({"k": OLD}).decode(data)


def shown_by(codec: Any) -> str:
    """All that a codec and its errors may be seen by: repr, log, traceback with locals, attributes."""
    stream = io.StringIO()
    logger = logging.Logger("seen")
    logger.addHandler(logging.StreamHandler(stream))
    text = [repr(codec), str(codec), f"{codec!r}"]
    for call in (
        lambda: codec.decode(codecs.encrypted({"k": NEW}).encode(b"x")),
        lambda: codec.decode(b"\xce\1\1z" + bytes(40)),
        lambda: codec.encode(object()),
        lambda: pickle.dumps(codec),
    ):
        try:
            call()
        except Exception as error:
            logger.exception("failed with %r", codec)
            text += traceback.TracebackException.from_exception(error, capture_locals=True).format()
    with JournaledQueue("/q", "secret", disk=MemoryDisk(), codec=codec) as queue:
        queue.put(b"x")
        text += [repr(queue), repr(queue.get()), repr(queue.stats())]
    return "".join(text) + stream.getvalue() + repr([vars(codec), dir(codec._cipher)])


def is_shown(key: bytes, text: str) -> bool:
    import base64

    return any(form in text for form in (repr(key)[2:-1], key.hex(), base64.b64encode(key).decode(), str(list(key))))


def test_no_key_is_shown() -> None:
    text = shown_by(codecs.encrypted({"k": OLD}))
    assert "keys 'k'" in text
    assert not is_shown(OLD, text)


def test_a_key_that_is_shown_is_seen() -> None:
    """The test above sees what it is for."""
    codec: Any = codecs.encrypted({"k": OLD})
    codec.kept = {"k": OLD}
    assert is_shown(OLD, shown_by(codec))


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_codec_with_keys_is_not_pickled(way: Any) -> None:
    with pytest.raises(TypeError, match="not pickled or copied"):
        way(codecs.encrypted({"k": OLD}))


@pytest.mark.parametrize(
    ("keys", "error", "said"),
    [
        ({}, ValueError, "at least one key"),
        ({"k": b"secret"}, ValueError, "key 'k' has 6 bytes"),
        ({"k": "secret-secret-16"}, TypeError, "key 'k' must be bytes, not str"),
        ({"": OLD}, ValueError, "1 to 255 bytes"),
        ({"k" * 256: OLD}, ValueError, "not 256"),
        ({"\ud800": OLD}, ValueError, "surrogate"),
        ({7: OLD}, TypeError, "key id must be a str"),
        ([OLD], TypeError, "mapping"),
    ],
)
def test_keys_that_are_none(keys: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        codecs.encrypted(keys)
    assert "secret" not in str(caught.value)


def test_without_the_package() -> None:
    missing = {"cryptography": None, "cryptography.exceptions": None}
    with mock.patch.dict(sys.modules, missing), pytest.raises(ImportError, match=r"kestrelpy\[encrypted\]"):
        codecs.encrypted({"k": OLD})
