"""``make demo-ship``, small; and its proof, which must fail where something is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kestrelpy.demo.ship.__main__ import DemoBurnt, Machines, main
from kestrelpy.demo.ship.ledger import KEPT, LOOSE, QUEUES, OutsideLedger, line_of, noted, number_of
from kestrelpy.demo.ship.proof import BurnProof, prove
from tests.spark.sessions import need_java, slow_spark

SEED = 7
FAR = 1 << 30


def test_the_demo_proves_its_point(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    assert main(["--burns", "2", "--seconds", "1", "--seed", "1", "--store", f"file://{store}"]) == 0
    said = capsys.readouterr().out
    assert "proven" in said
    assert said.count("has burnt: SIGKILL") == 2
    assert re.search(r"lost with machines +0 +[\d,]+\n", said)
    assert not [path for path in store.rglob("*") if path.is_file()], "what was in the store is deleted"


@slow_spark
def test_spark_reads_what_has_not_burnt(capsys: pytest.CaptureFixture[str]) -> None:
    need_java()
    assert main(["--spark", "--burns", "1", "--seconds", "1", "--seed", "1"]) == 0
    said = capsys.readouterr().out
    assert "proven" in said
    assert re.search(r"read by Spark +[1-9]", said)


def test_a_store_that_is_none_ends_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--store", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("demo-ship: ")


def test_a_service_that_fails_ends_the_demo(tmp_path: Path) -> None:
    (tmp_path / "machine-0").write_text("a file, and no folder")
    machines = Machines(tmp_path, f"file://{tmp_path}/store", SEED)
    try:
        with pytest.raises(DemoBurnt, match=r"machine 0 ended with status 1: .*machine-0"):
            machines.begin()
    finally:
        machines.close()


# -- ledgers ---------------------------------------------------------------------------------------------------------


def test_a_torn_note_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "x.ledger"
    path.write_bytes(b"got 1 a line\ngot 2 a torn li")
    assert noted(tmp_path, "x") == [[b"got", b"1", b"a line"]]
    ledger = OutsideLedger(tmp_path, "x")
    ledger.got([(2, b"a torn line")])
    ledger.close()
    assert noted(tmp_path, "x") == [[b"got", b"1", b"a line"], [b"got", b"2", b"a torn line"]]
    assert noted(tmp_path, "nothing") == []


def test_a_line_says_whose_it_is() -> None:
    line = line_of(SEED, KEPT, 100)
    assert number_of(KEPT, line) == 100
    assert number_of(LOOSE, line) == number_of(KEPT, b"nonsense") == number_of(KEPT, b"safe x y") == 0
    assert len({line, line_of(SEED + 1, KEPT, 100), line_of(SEED, LOOSE, 100), line_of(SEED, KEPT, 101)}) == 4


# -- the proof -------------------------------------------------------------------------------------------------------

Notes = dict[str, list[str]]


def got(queue: str, item_id: int, number: int, *, seed: int = SEED) -> str:
    return f"got {item_id} {line_of(seed, queue, number).decode()}"


def sound() -> Notes:
    """Two machines: one burns at 10 s. Then ``safe`` goes on after line 4, and ``fast`` has lost lines 3 and 4."""
    notes: Notes = {"burns": ["burn 0 10.0"]}
    for queue, restored in ((KEPT, 4), (LOOSE, 2)):
        notes[f"{queue}.put"] = [
            *("begin 0 0 1.0", "try 1 2 2.0", "put 1 2 1 2.1", "try 3 4 9.0", "put 3 4 3 9.1", "try 5 6 9.9"),
            *(f"begin 1 {restored} 11.0", "try 7 8 11.1", f"put 7 8 {restored + FAR} 11.5"),
        ]
        notes[f"{queue}.got"] = [
            *("begin 0 0 1.0", *(got(queue, number, number) for number in (1, 2, 3))),
            *(f"begin 1 {restored} 11.0", *(got(queue, number, number) for number in range(2, restored + 1))),
            *(got(queue, restored + FAR + at, 7 + at) for at in range(2)),
        ]
        notes[f"{queue}.spark"] = [
            *(got(queue, number, number) for number in range(1, restored + 1)),
            *(got(queue, restored + FAR + at, 7 + at) for at in range(2)),
        ]
    return notes


def proof_of(folder: Path, notes: Notes) -> BurnProof:
    for name, lines in notes.items():
        (folder / f"{name}.ledger").write_text("".join(f"{line}\n" for line in lines))
    return prove(folder, SEED)


def test_what_is_sound_is_proven(tmp_path: Path) -> None:
    proof = proof_of(tmp_path, sound())
    assert proof.complaints == []
    safe, fast = (proof.queues[queue] for queue in QUEUES)
    assert (safe.put, safe.read, safe.read_again, safe.lost) == (6, 6, 2, 0)
    assert (fast.put, fast.read, fast.read_again, fast.lost) == (6, 5, 1, 2)
    assert (safe.by_spark, fast.by_spark) == (6, 4)
    assert fast.worst_seconds == pytest.approx(0.9)
    assert proof.takeovers == [pytest.approx(1.5)]


@pytest.mark.parametrize(
    ("name", "line", "instead", "complaint"),
    [
        # lost
        ("safe.got", got(KEPT, 4, 4), "", "safe: 1 acknowledged lines were never read; the first one is line 4"),
        ("fast.got", got(LOOSE, 1, 1), "", "fast: 1 acknowledged lines were never read; the first one is line 1"),
        ("safe.put", "begin 1 4 11.0", "begin 1 3 11.0", "safe: 1 acknowledged lines burnt with machine 0"),
        ("fast.put", "put 3 4 3 9.1", "put 3 4 3 6.9", "fast: machine 0 took 3.1 s of acknowledged lines with it"),
        # foreign
        ("safe.got", got(KEPT, 4, 4), got(KEPT, 4, 4, seed=8), "safe: a foreign line was read, with id 4"),
        ("safe.got", got(KEPT, 4, 4), got(LOOSE, 4, 4), "safe: a foreign line was read, with id 4"),
        ("fast.got", got(LOOSE, 2, 2), got(LOOSE, 2, 99), "fast: a foreign line was read, with id 2"),
        ("fast.got", got(LOOSE, 1, 1), got(LOOSE, 1, 1)[:-1], "fast: a foreign line was read, with id 1"),
        ("safe.got", got(KEPT, 4, 4), got(KEPT, 5, 4), "safe: line 4 was put with id 4, and read with id 5"),
        # out of order
        ("safe.got", got(KEPT, 1, 1), f"{got(KEPT, 3, 3)}\n{got(KEPT, 1, 1)}", "safe: id 1 was read after id 3"),
        ("fast.got", got(LOOSE, 1, 1), f"{got(LOOSE, 1, 1)}\n{got(LOOSE, 1, 1)}", "fast: id 1 was read after id 1"),
        ("fast.put", f"put 7 8 {FAR + 2} 11.5", "put 7 8 3 11.5", "fast: ids do not rise: line 7 has id 3, after id 4"),
        # Spark
        ("safe.spark", got(KEPT, 4, 4), "", "safe: Spark has not read 1 lines; the first one is line 4"),
        ("fast.spark", got(LOOSE, 2, 2), got(LOOSE, 2, 2, seed=8), "fast: Spark has read a foreign line, with id 2"),
        (
            "safe.spark",
            got(KEPT, 2, 2),
            f"{got(KEPT, 2, 2)}\n{got(KEPT, 2, 2)}",
            "safe: Spark has read id 2 after id 2",
        ),
        ("safe.spark", got(KEPT, 4, 4), got(KEPT, 5, 4), "safe: Spark has read a foreign line, with id 5"),
        # machines
        ("safe.put", "put 7 8 1073741828 11.5", "", "safe: machine 1 has put nothing"),
        ("burns", "burn 0 10.0", "burn 0 10.0\nburn 1 12.0", "fast: 2 machines burnt, and 2 had the queue"),
    ],
)
def test_the_proof_fails_where_something_is_wrong(
    tmp_path: Path, name: str, line: str, instead: str, complaint: str
) -> None:
    notes = sound()
    at = notes[name].index(line)
    notes[name][at : at + 1] = instead.split("\n") if instead else []
    assert complaint in "\n".join(proof_of(tmp_path, notes).complaints)


def test_many_complaints_are_not_all_told(tmp_path: Path) -> None:
    notes = sound()
    notes["safe.got"] += [got(KEPT, number, number, seed=8) for number in range(1, 30)]
    complaints = proof_of(tmp_path, notes).complaints
    assert len(complaints) == 11
    assert complaints[-1] == "safe: and 19 more complaints"
