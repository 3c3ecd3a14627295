"""The golden files: what an earlier release wrote must be read for ever, and version 1 is still written to the same
bytes.
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from kestrelpy import JournaledQueue, QueueEmpty, scan, verify
from kestrelpy._journal import format as fmt
from kestrelpy._journal.file_names import lasting_name
from kestrelpy.testing import ManualClock

HERE = Path(__file__).parent
CASES = sorted(path.relative_to(HERE).as_posix() for path in HERE.glob("v*/*") if path.is_dir())
NOW_MS = 1_700_000_000_000


def expected_of(case: str) -> Any:
    return json.loads((HERE / case / "expected.json").read_text())


@pytest.fixture
def copied(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the case's files, without what is expected of them."""
    shutil.copytree(HERE / request.param, tmp_path / "q", ignore=shutil.ignore_patterns("expected.json"))
    return tmp_path / "q"


def test_the_cases_of_version_1_are_all_there() -> None:
    names = {case.split("/")[1] for case in CASES if case.startswith("v1/")}
    assert names == {"plain", "expiring", "batch", "checkpoint", "closed", "torn"}


@pytest.mark.parametrize(("copied", "case"), [(case, case) for case in CASES], indirect=["copied"])
def test_what_was_put_is_found_by_a_scan(copied: Path, case: str) -> None:
    before = {path.name: path.read_bytes() for path in copied.iterdir()}
    found = [[record.id, record.data.hex(), record.added_ms, record.expires_ms] for record in scan(copied, "golden")]
    assert found == expected_of(case)["items"]
    report = verify(copied, "golden")
    assert report.ok
    assert (report.items, report.torn_bytes > 0) == (len(found), case.endswith("torn"))
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == before


@pytest.mark.parametrize(("copied", "case"), [(case, case) for case in CASES], indirect=["copied"])
def test_what_was_not_done_is_delivered(copied: Path, case: str) -> None:
    expected = expected_of(case)
    items = {item_id: bytes.fromhex(data) for item_id, data, _, _ in expected["items"]}
    with JournaledQueue(copied, "golden", clock=ManualClock(NOW_MS + 60_000)) as queue:
        for name, figures in (expected["readers"] or {"": None}).items():
            reader = queue.reader(name)
            if figures is not None:
                assert (reader.head, reader.items, reader.bytes) == (
                    figures["head"],
                    figures["items"],
                    figures["bytes"],
                )
            delivered: dict[int, Any] = {}
            while True:
                try:
                    item = reader.get_nowait()
                except QueueEmpty:
                    break
                delivered[item.id] = item
                assert item.data == items[item.id]
            assert len(delivered) == reader.items
            assert list(delivered) == sorted(delivered)
            if figures is None:
                assert list(delivered) == list(items)
            else:
                counts = {int(item_id): count for item_id, count in figures["error_counts"].items()}
                assert {item_id: item.error_count for item_id, item in delivered.items() if item.error_count} == counts
        assert queue.put(b"next") > max(items)


def test_the_reader_with_spans_skips_exactly_them(tmp_path: Path) -> None:
    shutil.copytree(HERE / "v1/checkpoint", tmp_path / "q")
    with JournaledQueue(tmp_path / "q", "golden", clock=ManualClock(NOW_MS)) as queue:
        assert [(item.id, item.error_count) for item in queue.reader("first").get_many(20)] == [
            (3, 3), (7, 1), (8, 0), (10, 0), (11, 0), (12, 0)
        ]  # fmt: skip
        assert [item.id for item in queue.reader("second").get_many(20)] == [12]


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("v1/")])
def test_encoding_again_gives_the_same_bytes(case: str) -> None:
    segments = sorted((HERE / case).glob("*.segment"))
    assert segments
    for path in segments:
        data = path.read_bytes()
        header = fmt.decode_header(data)
        assert header is not None
        again, at = fmt.encode_header(header), fmt.HEADER_BYTES
        while (frame := fmt.decode_frame(data, at, header.marker)) is not None:
            again += encoded(frame, header)
            at += frame.size
        assert data[:at] == again
        assert case.endswith("torn") or not data[at:].strip(b"\0")
    for path in [*(HERE / case).glob("*.checkpoint"), *(HERE / case).glob("*.mark")]:
        data = path.read_bytes()
        at = fmt.CHECKPOINT_PREFIX_BYTES
        assert data[:at] == fmt.checkpoint_prefix()
        while at < len(data):
            (length,) = struct.unpack_from("<I", data, at + 4)
            state, _ = fmt.decode_checkpoints(fmt.checkpoint_prefix() + data[at : at + 8 + length])
            assert state is not None
            assert fmt.encode_checkpoint(state) == data[at : at + 8 + length]
            at += 8 + length


def encoded(frame: fmt.Frame, header: fmt.SegmentHeader) -> bytes:
    if frame.footer is not None:
        return fmt.encode_footer(frame.footer, header.number, header.marker)
    data, added_ms, expires_ms = frame.entries[0]
    if frame.kind & fmt.KIND_BATCH:
        items = [entry[0] for entry in frame.entries]
        return fmt.encode_batch(
            frame.first_id, items, list(map(len, items)), added_ms, expires_ms, frame.watermark, header.marker
        )
    return fmt.encode_item(frame.first_id, data, added_ms, expires_ms, frame.watermark, header.marker)


def test_the_script_refuses_to_make_them_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.golden import make_golden

    before = {path: path.read_bytes() for path in HERE.glob("v*/*/*")}
    assert make_golden.main() == 1
    assert "never made again" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in HERE.glob("v*/*/*")} == before


@pytest.mark.parametrize("case", [case.split("/")[1] for case in CASES if case.startswith("v1/")])
def test_this_release_still_writes_items_to_the_same_bytes(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same time and the same randomness, the segments come out the same: writing has not changed unnoticed."""
    from tests.golden import make_golden

    made = {lasting_name(name): data for name, data in make_golden.make(case).items()}
    golden = {path.name: path.read_bytes() for path in (HERE / "v1" / case).iterdir()}
    assert {name for name in made if name.endswith(".segment")} == {
        name for name in golden if name.endswith(".segment")
    }
    for name, data in golden.items():
        if name.endswith(".segment"):
            assert made[name] == data
