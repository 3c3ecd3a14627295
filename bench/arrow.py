"""A queue as Arrow, beside the same rows in an Arrow file: ``python -m bench.arrow``.

Workloads:
    one size  items of 100 bytes, as a service puts them one by one.
    sizes     items of 50 to 150 bytes, by hundreds.
Phases, all in rows a second, with the columns id, added and data:
    batches   every batch is made, and dropped.
    pandas    a DataFrame, with an object of Python for each item, as pandas has bytes.
    polars    a DataFrame.
    duckdb    a sum over the lengths of all items.
Each is there a second time, for a second of processor time, on whichever threads.

Contenders: the queue; the queue without the check of its checksums, which is no option, but says what they cost; and
the floor, the same rows in an Arrow IPC file, which has no checksums. How not to misread it: the files are in the page
cache. The Arrow file is mapped, and its values are used where they are: "batches" of it touches none of them. A queue
has other bytes between its items, which must be left out by a copy.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench import program
from bench.goals import Figure, Goal
from bench.measure import Contender, Figures, LeftOut, Workload
from kestrelpy import JournaledQueue

ROWS = 2_000_000
NAMES = ["id", "added", "data"]
OURS, UNCHECKED, FLOOR = "kestrelpy", "kestrelpy, no checksums", "Arrow IPC file"
Stream = Callable[[Path], Any]


def one_size(queue: JournaledQueue, count: int) -> None:
    rnd = random.Random(1)
    for _ in range(count):
        queue.put(rnd.randbytes(100))


def sizes(queue: JournaledQueue, count: int) -> None:
    rnd = random.Random(2)
    for _ in range(count // 100):
        queue.put_many([rnd.randbytes(rnd.randrange(50, 151)) for _ in range(100)])


def from_queue(folder: Path) -> Any:
    from kestrelpy.arrow import read

    return read(folder / "queue", "bench", columns=NAMES)


def from_file(folder: Path) -> Any:
    import pyarrow as pa

    return pa.ipc.open_stream(pa.memory_map(str(folder / "rows.arrow")))


def no_checks() -> AbstractContextManager[object]:
    from kestrelpy.arrow import decode

    return patch.object(decode, "_is_intact", lambda *_: True)


# -- what is done with a stream --------------------------------------------------------------------------------------


def to_batches(stream: Any) -> int:
    return sum(batch.num_rows for batch in stream)


def to_pandas(stream: Any) -> int:
    return len(stream.read_pandas())


def to_polars(stream: Any) -> int:
    import polars

    return len(polars.from_arrow(stream))


def to_duckdb(stream: Any) -> int:
    import duckdb

    count: int
    count, _ = duckdb.from_arrow(stream).aggregate("count(*), sum(octet_length(data))").fetchall()[0]
    return count


USES = {"batches": to_batches, "pandas": to_pandas, "polars": to_polars, "duckdb": to_duckdb}


def read(
    fill: Callable[[JournaledQueue, int], None], stream: Stream, around: Callable[[], AbstractContextManager[object]]
) -> Callable[[Path, float], Figures]:
    """Make the rows, in a queue and in a file, and read them."""

    def measure(folder: Path, scale: float) -> Figures:
        try:
            import duckdb  # noqa: F401 - see whether they are there
            import pandas  # noqa: F401
            import polars  # noqa: F401
            import pyarrow as pa
        except ImportError as missing:
            raise LeftOut(f"{missing.name} is not installed") from None
        count = max(1000, int(ROWS * scale)) // 100 * 100
        with JournaledQueue(folder / "queue", "bench", sync="never") as queue:
            fill(queue, count)
        rows = from_queue(folder)
        with pa.OSFile(str(folder / "rows.arrow"), "w") as file, pa.ipc.new_stream(file, rows.schema) as writer:
            for batch in rows:
                writer.write_batch(batch)
        figures = Figures()
        with around():
            for phase, use in USES.items():
                began, used = time.perf_counter(), time.process_time()
                found = use(stream(folder))
                figures[phase] = count / (time.perf_counter() - began)
                figures[f"{phase}, processor"] = count / (time.process_time() - used)
                assert found == count, f"{phase} has read {found} of {count}"
        return figures

    return measure


def _contenders(fill: Callable[[JournaledQueue, int], None]) -> tuple[Contender, ...]:
    return (
        Contender(OURS, read(fill, from_queue, nullcontext)),
        Contender(UNCHECKED, read(fill, from_queue, no_checks)),
        Contender(FLOOR, read(fill, from_file, nullcontext)),
    )


WORKLOADS = (
    Workload("one size", f"{ROWS:,} items of 100 bytes", "rows/s", _contenders(one_size), max_repeats=5),
    Workload("sizes", f"{ROWS:,} items of 50 to 150 bytes", "rows/s", _contenders(sizes), max_repeats=5),
)


def _goals() -> Iterator[Goal]:
    for workload in WORKLOADS:
        for phase in ("pandas", "polars", "duckdb"):
            ours = Figure(workload.name, OURS, phase)
            yield Goal(f"{workload.name}, {phase}: rows/s", ours, at_least=2e6)
            floor = Figure(workload.name, FLOOR, phase)
            yield Goal(f"{workload.name}, {phase}: our rows/s over the file's", ours, floor, at_least=0.05)
        ours, without = (Figure(workload.name, name, "batches") for name in (OURS, UNCHECKED))
        yield Goal(f"{workload.name}: rows/s over those without checksums", ours, without, at_least=0.4)


GOALS = tuple(_goals())


def main(argv: Sequence[str] | None = None) -> int:
    """Run what ``argv`` asks for; returns the exit status."""
    return program.run("arrow", __doc__, WORKLOADS, GOALS, argv)


if __name__ == "__main__":
    sys.exit(main())
