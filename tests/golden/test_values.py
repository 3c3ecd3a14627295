"""Golden values: what a codec of an earlier release wrote is read for ever, with exactly one meaning."""

from __future__ import annotations

import pytest

from kestrelpy import codecs
from tests.golden import values
from tests.support.packages import need_codecs

need_codecs()
aead = pytest.importorskip("cryptography.hazmat.primitives.ciphers.aead")
CASES = values.cases()
SAME_BYTES = ("json", "utf8", "msgspec-json", "msgspec-msgpack", "pydantic", "log-record")
"""What has one form only. A frame of zstd depends on the release of its library, and a nonce is random."""


def test_each_case_has_its_file() -> None:
    assert {path.name for path in values.HERE.iterdir()} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_golden_value_is_decoded(name: str) -> None:
    codec, value = CASES[name]
    assert codec.decode((values.HERE / name).read_bytes()) == value


@pytest.mark.parametrize("name", SAME_BYTES)
def test_a_golden_value_is_encoded_to_the_same_bytes(name: str) -> None:
    codec, value = CASES[name]
    assert codec.encode(value) == (values.HERE / name).read_bytes()


def test_an_encrypted_item_is_laid_out_as_the_page_says() -> None:
    """Written from docs/format.md, without the codec."""
    data = (values.HERE / "encrypted").read_bytes()
    assert data[:7] == b"\xce\x01\x04" + b"2026"
    opened = aead.AESGCM(values.KEY).decrypt(data[7:19], data[19:], data[:7])
    assert opened.decode() == values.TEXT
    made = data[:7] + bytes(12) + aead.AESGCM(values.KEY).encrypt(bytes(12), b"pears", data[:7])
    assert codecs.encrypted({"2026": values.KEY}).decode(made) == b"pears"


def test_files_that_are_there_are_not_made_again(capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in values.HERE.iterdir()}
    assert values.main() == 0
    assert "0 files made" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in values.HERE.iterdir()} == before
