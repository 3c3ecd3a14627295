"""The pipeline: its proof finds what is wrong, and the whole of it runs."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from kestrelpy.codecs import JSON
from kestrelpy.demo.corpus import gather
from kestrelpy.demo.pipeline import _plan, proof
from kestrelpy.demo.pipeline.__main__ import main
from tests.spark.sessions import long_spark, need_java


@pytest.fixture
def items(tmp_path: Path) -> list[dict[str, Any]]:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.py").write_text("import os\n# TODO: more of it\n\nx = 1\n", encoding="utf-8")
    (corpus / "b.py").write_bytes(b"not utf-8 \xff FIXME\nlast line without an end")
    return list(_plan.items(gather(str(corpus)), 100))


@pytest.fixture
def wanted(items: list[dict[str, Any]]) -> proof.Account:
    return proof.account(items)


def ledger_of(wanted: proof.Account) -> list[str]:
    return [json.dumps({"id": item_id, "text": text}) for item_id, text in wanted.alerts.items()]


def test_the_input_is_the_same_each_time_and_counted(items: list[dict[str, Any]], wanted: proof.Account) -> None:
    assert [(item["file"], item["line"]) for item in items] == [("a.py", at) for at in range(1, 5)] + [
        ("b.py", 1),
        ("b.py", 2),
    ]
    assert items[4]["text"] == "not utf-8 \ufffd FIXME"
    assert (dict(wanted.lines), dict(wanted.words)) == ({"a.py": 4, "b.py": 2}, {"a.py": 7, "b.py": 8})
    assert sorted(wanted.alerts) == [2, 5]
    assert wanted.checksums == sum(zlib.crc32(JSON.encode(item)) for item in items)
    assert (proof.account(items[:5]).total, wanted.total) == (5, 6)


def test_what_is_right_is_not_complained_about(wanted: proof.Account) -> None:
    assert proof.check_words([("a.py", 1, 3), ("a.py", 3, 4), ("b.py", 2, 8)], wanted) == []
    assert proof.check_alerts(reversed(ledger_of(wanted)), wanted) == []
    assert proof.check_lake(6, 6, wanted.checksums, wanted) == []


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([("a.py", 4, 7)], "b.py: 0 lines, not 2"),
        ([("a.py", 5, 7), ("b.py", 2, 8)], "a.py: 5 lines, not 4"),
        ([("a.py", 4, 6), ("b.py", 2, 8)], "a.py: 6 words, not 7"),
        ([("a.py", 4, 7), ("b.py", 2, 8), ("c.py", 1, 0)], "c.py: 1 lines, not 0"),
    ],
)
def test_wrong_counts_are_found(wanted: proof.Account, rows: list[tuple[str, int, int]], complaint: str) -> None:
    assert complaint in proof.check_words(rows, wanted)


def test_wrong_alerts_are_found(wanted: proof.Account) -> None:
    first, second = ledger_of(wanted)
    assert proof.check_alerts([first], wanted) == ["alert 5 is missing"]
    assert proof.check_alerts([first, second, second], wanted) == ["alert 5 came 2 times"]
    assert proof.check_alerts([first, second, '{"id": 3, "text": ""}'], wanted)[0] == "alert 3 is not in the input"
    changed = second.replace("FIXME", "FIXED")
    assert proof.check_alerts([first, changed], wanted) == ["alert 5 has another text"]


def test_a_wrong_lake_is_found(wanted: proof.Account) -> None:
    assert proof.check_lake(7, 6, wanted.checksums, wanted) == ["7 items with 6 ids, not 6"]
    assert proof.check_lake(6, 5, wanted.checksums, wanted) == ["6 items with 5 ids, not 6"]
    assert proof.check_lake(6, 6, wanted.checksums + 1, wanted) == ["the bytes of the items differ from the input"]


def test_without_lines_there_is_no_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need_java()
    assert main(["--input", str(tmp_path / "none")]) == 2
    assert "no such file or folder" in capsys.readouterr().err


@long_spark
@pytest.mark.parametrize("with_store", [False, True])
def test_the_whole_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str], with_store: bool) -> None:
    need_java()
    store = ["--store", f"file://{tmp_path}/store"] if with_store else []
    assert main(["--lines", "60000", "--pace", "6000", "--seed", "1", "--keep", str(tmp_path / "kept"), *store]) == 0
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    told = capsys.readouterr().out
    assert "kills survived  2" in told
    assert "proven: every line counted once" in told
    assert (tmp_path / "kept" / "report" / "index.html").exists()
