"""The examples that claim to survive: killed at several moments with SIGKILL, and started again in the same folder.

Nothing that they have acknowledged may be lost, and nothing may be there more often than their docstrings say. Each
check is itself tried on an example with a planted fault.
"""

from __future__ import annotations

import ast
import re
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.examples.runs import Ended, is_kept, promised, run
from tests.support.budget import drawn
from tests.support.paths import ROOT

Check = Callable[[Path, list[Ended]], None]
"""What must hold of a folder after these runs, of which the last one came to its end."""


def lines_of(path: Path) -> Counter[str]:
    return Counter(path.read_text("utf-8").splitlines()) if path.exists() else Counter()


def found(pattern: str, runs: list[Ended]) -> list[str]:
    return [match for ended in runs for match in re.findall(pattern, ended.output, re.MULTILINE)]


def webhooks(folder: Path, runs: list[Ended]) -> None:
    received = lines_of(folder / "received.txt")
    stored = found(r"^stored (\w+) /(?:ok|flaky)$", runs)
    assert set(stored) <= set(received), "a hook that was stored has not arrived"
    assert max(received.values()) <= len(runs), "a hook was called once more than there were kills"
    given_up = found(r"^dead letter: (\w+) /gone ", runs)
    assert set(found(r"^stored (\w+) /gone$", runs)) <= set(given_up), "a dead letter is missing"


def crawler(folder: Path, runs: list[Ended]) -> None:
    pages = lines_of(folder / "pages.txt")
    assert len(pages) == 12, "a page is missing"
    assert pages.total() <= 12 + 3 * (len(runs) - 1), "more is doubled than three workers had in hand"


def replacement(folder: Path, runs: list[Ended]) -> None:
    promise = promised((ROOT / "examples" / "queue_replacement.py").read_text("utf-8"))
    assert is_kept(promise, runs[-1].output), f"a sentinel of the run before has ended a worker: {runs[-1].output}"


def log_shipper(folder: Path, runs: list[Ended]) -> None:
    shipped = lines_of(folder / "shipped.log")
    numbers: dict[tuple[str, str], Counter[int]] = {}
    for line, times in shipped.items():
        service, run_id, number = re.search(r" (shop|till) INFO (\w+) line (\d+)$", line).groups()  # type: ignore[union-attr]
        numbers.setdefault((service, run_id), Counter())[int(number)] += times
    for (service, _), seen in numbers.items():
        assert sorted(seen) == list(range(len(seen))), f"{service}: a line is missing in the middle"
        assert max(seen.values()) <= len(runs)
    whole = [service for (service, _), seen in numbers.items() if len(seen) == (100 if service == "shop" else 50)]
    said = found(r"^(shop: logged 100|till: killed after 50)", runs)
    assert Counter(line[:4] for line in said) <= Counter(whole), "a line of a service that had logged all is missing"


def producers(folder: Path, runs: list[Ended]) -> None:
    received = lines_of(folder / "received.txt")
    for name, batch in (each.rsplit("/", 1) for each in found(r"^published (\w+:\d/\d+)$", runs)):
        wanted = [f"{name}/{number}" for number in range(int(batch) * 10, int(batch) * 10 + 10)]
        assert all(received[line] for line in wanted), "an item of a batch that was published is missing"
    assert max(received.values()) <= len(runs)
    for name in {line.partition("/")[0] for line in received}:
        assert sum(line.startswith(f"{name}/") for line in received) % 10 == 0, "a part of a batch has arrived"


def stages(folder: Path, runs: list[Ended]) -> None:
    with closing(sqlite3.connect(folder / "results.db")) as db:
        rows = Counter(line for (line,) in db.execute("SELECT line FROM results"))
    assert max(rows.values()) == 1, "a row is doubled"
    last = max(int(line.split()[1].split("/")[0]) for line in rows)
    wanted = {f"line {number}/{line} 3.50" for number in range(1, last + 1) for line in range(200)}
    assert set(rows) == wanted, "a row is missing"
    assert f"all rows: {len(rows)}, each once: True" in runs[-1].output


def outbox(folder: Path, runs: list[Ended]) -> None:
    mails = lines_of(folder / "mails.txt")
    assert set(found(r"^ordered (\d+) for", runs)) <= set(mails), "an order that was committed has no mail"
    assert max(mails.values()) <= len(runs)
    assert "orders without a mail: 0, mails without an order: 0" in runs[-1].output


def fastapi(folder: Path, runs: list[Ended]) -> None:
    handled = Counter(line.split()[0] for line in lines_of(folder / "handled.txt").elements())
    assert set(found(r"^202 \{'id': (\d+)\}$", runs)) <= set(handled), "an order that was accepted is not handled"
    assert max(handled.values()) <= len(runs)


SURVIVORS: dict[str, tuple[Check, list[float]]] = {
    "webhooks": (webhooks, [1, 3, 4, 6, 9, 12, 0.4]),
    "crawler": (crawler, [1, 2, 3, 5, 9, 12, 0.5]),
    "queue_replacement": (replacement, [2, 0.15, 0.2, 0.25, 0.3]),
    "log_shipper": (log_shipper, [0.3, 0.6, 0.8, 1.0, 1.3, 1, 2]),
    "multiprocessing_producers": (producers, [1, 7, 25, 50, 79, 1.5, 2.5]),
    "exactly_once_stages": (stages, [0.4, 0.8, 1.1, 1.4, 1, 1.8, 2]),
    "outbox_on_sqlite": (outbox, [1, 2, 3, 4, 5, 0.8, 1.0]),
    "fastapi_service": (fastapi, [1, 2, 3, 0.7, 0.9]),
}
"""By example: what must hold, and when it is killed: after so many lines (whole numbers), or seconds (others)."""

MOMENTS = [(name, moment) for name, (_, moments) in SURVIVORS.items() for moment in drawn(moments, 1)]


@pytest.mark.parametrize(("name", "moment"), MOMENTS)
def test_killed_and_started_again(name: str, moment: float, tmp_path: Path) -> None:
    example = ROOT / "examples" / f"{name}.py"
    runs = [run(example, tmp_path, moment), run(example, tmp_path)]
    assert runs[0].status in (0, -signal.SIGKILL), runs[0].errors
    assert runs[1].status == 0, runs[1].errors
    if isinstance(moment, int) and moment < len(runs[1].output.splitlines()) - 1:
        assert runs[0].status == -signal.SIGKILL, "it was not killed in the middle"
    SURVIVORS[name][0](tmp_path, runs)


REPLACEMENT = (ROOT / "examples" / "queue_replacement.py").read_text("utf-8")
STATEMENTS = [
    (node.lineno, node.col_offset)
    for function in ast.parse(REPLACEMENT).body
    if isinstance(function, ast.FunctionDef)
    for node in ast.walk(function)
    if isinstance(node, ast.stmt) and node is not function
]
KILL = "__import__('os').kill(__import__('os').getpid(), 9)"


@pytest.mark.parametrize("statement", drawn(sorted(STATEMENTS), 3), ids=lambda statement: f"line {statement[0]}")
def test_the_replacement_is_killed_before_any_statement(statement: tuple[int, int], tmp_path: Path) -> None:
    lines = REPLACEMENT.splitlines(keepends=True)
    lines.insert(statement[0] - 1, f"{' ' * statement[1]}{KILL}\n")
    killed = tmp_path / "killed.py"
    killed.write_text("".join(lines), "utf-8")
    runs = [run(killed, tmp_path)]
    assert runs[0].status == -signal.SIGKILL or "    return" in lines[statement[0]], runs[0].errors
    runs.append(run(ROOT / "examples" / "queue_replacement.py", tmp_path))
    assert runs[1].status == 0, runs[1].errors
    replacement(tmp_path, runs)


def test_who_claims_to_survive_is_killed() -> None:
    claims = {
        path.stem
        for path in (ROOT / "examples").glob("*.py")
        if re.search(
            r"\ba kill\b|\bkill it\b|may be killed", (ast.get_docstring(ast.parse(path.read_text())) or "").lower()
        )
    }
    assert claims == set(SURVIVORS)


PLANTED: dict[str, tuple[list[tuple[str, str]], list[float]]] = {
    "webhooks": (  # a hook is acknowledged before it is called
        [("            with item:", "            item.commit()\n            if True:")],
        [4, 3],
    ),
    "crawler": (  # so is a job
        [
            ("            links = fetch(url)\n", "            job.delete()\n            links = fetch(url)\n"),
            ("            job.delete()\n            print", "            print"),
        ],
        [5, 9, 3],
    ),
    "queue_replacement": (  # a sentinel is the same in each run
        [
            ('END = {"end": RUN}', 'END = {"end": ""}'),
            ('    for name in "abcde":\n', '    threading.Event().wait(0.5)\n    for name in "abcde":\n'),
        ],
        [1, 1, 1],
    ),
    "log_shipper": (  # lines wait in memory
        [
            ("import logging\n", "import logging\nimport logging.handlers\n"),
            (
                "addHandler(DurableHandler(QUEUE, directory=FOLDER))",
                "addHandler(logging.handlers.MemoryHandler(1000, target=DurableHandler(QUEUE, directory=FOLDER)))",
            ),
        ],
        [30.0],
    ),
    "multiprocessing_producers": (  # a batch is reported before it is published
        [
            (
                '        inbox.put_many(FOLDER, "results"',
                '        print(f"published {name}/{number}\\n", end="", flush=True)\n' * 2
                + '        inbox.put_many(FOLDER, "results"',
            )
        ],
        [1, 3, 5, 7],
    ),
    "exactly_once_stages": (  # the hand-over has no version
        [(", app_id=source, version=items[-1].id)", ")")],
        [30.0],
    ),
    "outbox_on_sqlite": (  # a mail is marked and not sent
        [('"a") as file:', '"a" if int(mail["order"]) % 2 else "r+") as file:')],
        [4],
    ),
    "fastapi_service": (  # an order is accepted, and does not last
        [("aput(order)", "aput(order, expires_in=0.0)")],
        [30.0],
    ),
}
"""By example: what is written in place of what, and when it is killed until the check sees it."""


@pytest.mark.parametrize("name", drawn(PLANTED, 2))
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    changes, moments = PLANTED[name]
    source = (ROOT / "examples" / f"{name}.py").read_text("utf-8")
    for old, new in changes:
        assert source.count(old) == 1, f"{name} has changed: {old!r}"
        source = source.replace(old, new)
    for number, moment in enumerate(moments):
        folder = tmp_path / str(number)
        folder.mkdir()
        example = folder / f"{name}.py"
        example.write_text(source, "utf-8")
        runs = [run(example, folder, moment), run(example, folder)]
        try:
            SURVIVORS[name][0](folder, runs)
        except AssertionError:
            return
    raise AssertionError("the fault was not found")


def test_every_check_has_a_planted_fault() -> None:
    assert set(PLANTED) == set(SURVIVORS)
