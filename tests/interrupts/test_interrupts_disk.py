"""A KeyboardInterrupt at places of opening, using and closing a queue on the real disk: the locks are free after it.

At most the one descriptor that was on its way to whoever would close it is lost.
"""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from kestrelpy import JournaledQueue
from kestrelpy._disk.interface import Disk, Lock
from kestrelpy._disk.real import RealDisk
from kestrelpy.testing import MemoryDisk
from tests.interrupts.strikes import interrupter_at, watchdog
from tests.support.budget import ALL, LONG, SEED

FOLDER = Path("/proc/self/fd")

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="there is no /proc/self/fd here to count descriptors in")


def descriptors() -> int:
    gc.collect()
    return len(list(FOLDER.iterdir()))


def opening(folder: Path, queues: list[JournaledQueue]) -> Callable[[], object]:
    return lambda: queues.append(JournaledQueue(folder, "jobs", segment_bytes=4096))


def using(folder: Path, queues: list[JournaledQueue]) -> Callable[[], object]:
    opening(folder, queues)()

    def use() -> None:
        queues[0].put(b"x" * 3000)
        queues[0].get().commit()
        queues[0].checkpoint(durable=True)

    return use


def closing(folder: Path, queues: list[JournaledQueue]) -> Callable[[], object]:
    opening(folder, queues)()
    queues[0].get().commit()
    return queues[0].close


@pytest.mark.parametrize(
    ("prepare", "steps"), [(opening, (11, 13, 17)), (using, (97, 113, 131)), (closing, (97, 113, 131))]
)
def test_everything_is_given_back(
    prepare: Callable[[Path, list[JournaledQueue]], Callable[[], object]], steps: tuple[int, ...], folder: Path
) -> None:
    print(f"seed {SEED}")
    choose, struck = random.Random(SEED), 0
    at, step = 1, 1 if LONG else choose.choice(steps) * (1 if ALL else 4)
    while True:
        with JournaledQueue(folder, "jobs", segment_bytes=4096) as queue:
            queue.flush()
            queue.checkpoint(durable=True)  # what is over goes, or each opening would have more to do than the last
            queue.put_many([b"a" * 1000, b"b" * 1000])
        before = descriptors()
        queues: list[JournaledQueue] = []
        striker = interrupter_at(at)
        with watchdog(20.0), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", ResourceWarning
            )  # locks that an interrupt has dropped are closed as garbage
            was_struck = striker.run(prepare(folder, queues))
            for queue in queues:
                queue.close()
            gc.collect()
        more = descriptors() - before
        assert more <= 1, f"{more} more: {striker.where}"
        with JournaledQueue(folder, "jobs") as queue:  # the locks are free
            assert queue.peek().data in (b"a" * 1000, b"b" * 1000, b"x" * 3000)
        if not was_struck:
            break
        struck, at = struck + 1, at + step
    assert struck > 1


@pytest.mark.parametrize("disk", [MemoryDisk(), RealDisk()], ids=["memory", "real"])
def test_a_lock_whose_taking_was_interrupted_is_free(disk: Disk, tmp_path: Path) -> None:
    """At once: also while the exception is kept, whose traceback has what was made."""
    directory = disk.directory(str(tmp_path), create=True)
    held: list[Lock] = []
    kept: list[BaseException] = []

    def lock() -> None:
        try:
            held.append(directory.lock("a.lock"))
        except BaseException as error:
            kept.append(error)
            raise

    for at in range(1, 1000):
        if not interrupter_at(at).run(lock):
            break
        directory.lock("a.lock").release()
    assert at > 5, "the tracer sees nothing"
    assert len(kept) == at - 1
    held[0].release()
    directory.close()
