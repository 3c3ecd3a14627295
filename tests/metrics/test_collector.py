"""``Collector``: its figures are those of ``stats()``, and nothing that happens to a queue stops a scrape."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

import kestrelpy
from kestrelpy import (
    DurabilityUnknown,
    FullPolicy,
    JournaledQueue,
    QueueDiskFull,
    QueueEmpty,
    QueueFull,
    ReaderConfig,
    inbox,
    open_reader,
)
from kestrelpy.config import SYNC_BOUNDS
from kestrelpy.metrics import Collector
from kestrelpy.metrics.table import COUNTER, METRICS
from kestrelpy.testing import FailingDisk, ManualClock, MemoryDisk
from kestrelpy.work import WorkQueue
from tests.metrics.pages import about, figure, figures_on, needs_prometheus, page_of, promtool, types_on
from tests.support.budget import Tally
from tests.support.disks import GatedDisk
from tests.support.patience import PATIENCE, until


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000_000)


def check_queue(queue: JournaledQueue, figures: Any) -> None:
    """Every sample of a journaled queue, against ``stats()``."""
    stats, name = queue.stats(), queue.name
    mine = {"queue": name}
    expected = {
        "kestrel_up": 1,
        "kestrel_waiting_producers": stats.waiting_producers,
        "kestrel_put_total": stats.put_count,
        "kestrel_refused_total": stats.refused,
        "kestrel_journal_bytes": stats.journal_bytes,
        "kestrel_segments": stats.segments,
        "kestrel_unsynced_items": stats.tail_id - stats.durable_id,
        "kestrel_quarantined_total": stats.quarantined,
        "kestrel_sync_seconds_count": sum(stats.sync_buckets),
        "kestrel_sync_seconds_sum": stats.sync_seconds,
    }
    for sample, value in expected.items():
        assert figure(figures, sample, **mine) == value, sample
    for at, bound in enumerate(SYNC_BOUNDS):
        assert figure(figures, "kestrel_sync_seconds_bucket", **mine, le=repr(bound)) == sum(
            stats.sync_buckets[: at + 1]
        )
    for reader in stats.readers.values():
        both = {**mine, "reader": reader.name}
        assert about(figures, **both) == {
            "kestrel_items": reader.items,
            "kestrel_open_items": reader.open_items,
            "kestrel_bytes": reader.bytes,
            "kestrel_oldest_item_age_seconds": pytest.approx(reader.age),
            "kestrel_lag_bytes": reader.bytes,
            "kestrel_waiting_consumers": reader.waiter_count,
            "kestrel_delivered_total": reader.opened,
            "kestrel_committed_total": reader.committed,
            "kestrel_aborted_total": reader.aborted,
            "kestrel_expired_total": reader.expired,
            "kestrel_discarded_total": reader.discarded,
            "kestrel_skipped_total": reader.skipped,
            "kestrel_dead_total": reader.dead,
            "kestrel_dead_letter_failures_total": reader.dead_letter_failures,
            "kestrel_dead_too_large": reader.dead_too_large,
            "kestrel_timeouts_total": reader.get_misses,
            "kestrel_checkpoint_failures_total": reader.checkpoint_failures,
            "kestrel_hook_errors_total": reader.hook_errors,
        }


def busy_queue(clock: ManualClock, folder: Path) -> JournaledQueue:
    """A queue for which no figure is 0, as far as that goes."""

    def raises(_item: object) -> bool:
        raise RuntimeError("a hook")

    limited = ReaderConfig(max_items=8, on_abort=raises)
    queue = JournaledQueue(folder, "busy", sync="always", clock=clock, default_reader=limited)
    first, second = queue.reader("first"), queue.reader("second")
    queue.put_many([b"one", b"four", b"twelve"])
    queue.put(b"expires", expires_in=1)
    with first.get():
        clock.advance(5)
    first.get().abort()
    first.get()
    with pytest.raises(QueueFull):
        queue.put_many([b"x"] * 9)
    second.get_many(3)
    second.discard_expired()
    with pytest.raises(QueueEmpty):
        second.get(timeout=0)
    second.get_future()
    clock.advance(55)
    return queue


def test_the_figures_are_those_of_stats(clock: ManualClock, tmp_path: Path) -> None:
    with busy_queue(clock, tmp_path) as queue:
        figures = figures_on(page_of(queue))
        check_queue(queue, figures)
        first = about(figures, queue="busy", reader="first")
        assert first["kestrel_oldest_item_age_seconds"] == 60.0
        assert (first["kestrel_items"], first["kestrel_open_items"], first["kestrel_bytes"]) == (3, 1, 17)
        counters = ("delivered", "committed", "aborted", "hook_errors")
        assert [first[f"kestrel_{name}_total"] for name in counters] == [3, 1, 1, 1]
        second = about(figures, queue="busy", reader="second")
        assert (second["kestrel_expired_total"], second["kestrel_timeouts_total"]) == (1, 1)
        assert second["kestrel_waiting_consumers"] == 1
        assert figure(figures, "kestrel_refused_total", queue="busy") == 1
        assert figure(figures, "kestrel_put_total", queue="busy") == 4


def test_jobs_by_tube_and_state(clock: ManualClock) -> None:
    with WorkQueue(None, "mail", clock=clock, max_jobs=6) as queue, queue.session() as session:
        for number in range(3):
            queue.put(b"job", tube="out", ttr=10, priority=number)
        queue.put(b"later", tube="out", delay=60)
        queue.put(b"elsewhere")
        queue.put(b"elsewhere")
        with pytest.raises(QueueFull):
            queue.put(b"too many")
        session.watch("out")
        session.ignore("default")
        session.reserve(timeout=0).bury()
        session.reserve(timeout=0)
        clock.advance(10)  # its time is over, and it is ready again
        session.reserve(timeout=0)
        figures = figures_on(page_of(queue))
        for tube in queue.tubes():
            its = queue.stats_tube(tube)
            for state in ("ready", "reserved", "delayed", "buried"):
                value = figure(figures, "kestrel_jobs", queue="mail", tube=tube, state=state)
                assert value == getattr(its, state), (tube, state)
        assert [figure(figures, "kestrel_jobs", queue="mail", tube="out", state=state) for state in _STATES] == [
            1,
            1,
            1,
            1,
        ]
        stats = queue.stats()
        assert about(figures, queue="mail").keys() >= {"kestrel_job_reservations_total", "kestrel_job_timeouts_total"}
        assert figure(figures, "kestrel_job_timeouts_total", queue="mail") == stats.timeouts == 1
        assert figure(figures, "kestrel_job_reservations_total", queue="mail") == 3
        assert figure(figures, "kestrel_put_total", queue="mail") == stats.total_jobs == 6
        assert figure(figures, "kestrel_bytes", queue="mail", reader="") == stats.bytes
        assert figure(figures, "kestrel_refused_total", queue="mail") == 1
        assert figure(figures, "kestrel_waiting_consumers", queue="mail", reader="") == 0


_STATES = ("ready", "reserved", "delayed", "buried")


def test_the_journal_of_a_work_queue(tmp_path: Path) -> None:
    with WorkQueue(tmp_path, "mail", sync="always") as queue:
        queue.put(b"job")
        figures = figures_on(page_of(queue))
        stats = queue.stats()
        assert figure(figures, "kestrel_journal_bytes", queue="mail") == stats.journal_bytes > 0
        assert figure(figures, "kestrel_segments", queue="mail") == stats.segments == 1
        assert figure(figures, "kestrel_unsynced_items", queue="mail") == 0
        assert figure(figures, "kestrel_sync_seconds_count", queue="mail") >= 1


@needs_prometheus
def test_promtool_likes_the_page(clock: ManualClock, tmp_path: Path) -> None:
    with busy_queue(clock, tmp_path) as queue, WorkQueue(None, "jobs") as jobs:
        page = page_of(queue, jobs, labels={"app": "shop"})
        checked = promtool("check", "metrics", given=page)
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_every_metric_has_its_type_and_a_help(clock: ManualClock, tmp_path: Path) -> None:
    with busy_queue(clock, tmp_path) as queue, WorkQueue(None, "jobs") as jobs:
        page = page_of(queue, jobs, tmp_path)
    types = types_on(page)
    assert types.keys() == {name for name in METRICS if not name.startswith("kestrel_server")}
    assert types == {name: METRICS[name].kind for name in types}
    assert all((METRICS[name].kind == COUNTER) == name.endswith("_total") for name in METRICS)
    assert all(f"# HELP {name} {METRICS[name].help}\n" in page for name in types)


# -- nothing stops a scrape --------------------------------------------------------------------------------------------


def check_down(figures: Any, down: str, up: str) -> None:
    """One queue is in trouble, and the other one is shown."""
    assert about(figures, queue=down) == {"kestrel_up": 0}
    assert about(figures, queue=up)["kestrel_up"] == 1
    assert "kestrel_put_total" in about(figures, queue=up)


def test_a_queue_that_is_closed_and_one_that_is_erased(tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "fine") as fine:
        for end in ("close", "erase"):
            queue = JournaledQueue(tmp_path, "gone")
            queue.reader().get_future()
            collector = page_of(queue, fine)
            assert about(figures_on(collector), queue="gone")["kestrel_up"] == 1
            registry = CollectorRegistry()
            registry.register(Collector(queue, fine))
            getattr(queue, end)()
            check_down(figures_on(generate_latest(registry).decode()), "gone", "fine")
        with WorkQueue(tmp_path, "jobs") as jobs:
            pass
        check_down(figures_on(page_of(jobs, fine)), "jobs", "fine")


def test_a_queue_whose_sync_has_failed(tmp_path: Path) -> None:
    disk = GatedDisk()
    with JournaledQueue(tmp_path, "fine") as fine:
        queue = JournaledQueue(tmp_path, "failed", sync="always", disk=disk)
        jobs = WorkQueue(tmp_path, "jobs", sync="always", disk=disk)
        queue.put(b"x")
        jobs.put(b"x")
        assert about(figures_on(page_of(queue, fine)), queue="failed")["kestrel_up"] == 1
        disk.error = OSError(5, "the disk")
        for put in (queue.put, jobs.put):
            with pytest.raises(DurabilityUnknown):
                put(b"y")
        figures = figures_on(page_of(queue, jobs, fine))
        check_down(figures, "failed", "fine")
        check_down(figures, "jobs", "fine")
        disk.error = None
        for each in (queue, jobs):
            each.close()


def test_whatever_stats_raises_the_others_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with JournaledQueue(tmp_path, "fine") as fine, JournaledQueue(tmp_path, "odd") as odd:
        real = JournaledQueue.stats

        def stats(self: JournaledQueue) -> Any:
            if self is odd:
                raise ZeroDivisionError
            return real(self)

        monkeypatch.setattr(JournaledQueue, "stats", stats)
        check_down(figures_on(page_of(odd, fine)), "odd", "fine")


def test_a_forked_child_has_nothing_of_its_parents_queues(tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "parents") as queue, WorkQueue(tmp_path, "jobs") as jobs:
        queue.reader()
        registry = CollectorRegistry()
        registry.register(Collector(queue, jobs))
        assert b'kestrel_up{queue="parents"} 1.0' in generate_latest(registry)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.write(writing, generate_latest(registry))
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            page = pipe.read().decode()
        os.waitpid(child, 0)
        assert about(figures_on(page), queue="parents") == {"kestrel_up": 0}
        assert about(figures_on(page), queue="jobs") == {"kestrel_up": 0}


def within_patience(call: Callable[[], object]) -> bool:
    """Whether the call, on a thread of its own, returns while this thread has what it has."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return not thread.is_alive()


def test_no_lock_is_taken_that_a_put_needs(tmp_path: Path) -> None:
    """With the locks Q and W held, a scrape goes through: so it never holds one of them."""
    with JournaledQueue(tmp_path, "queue") as queue, WorkQueue(tmp_path, "jobs") as jobs:
        queue.put(b"x")
        jobs.put(b"x")
        queue.reader()
        with queue._lock, jobs._core.lock:
            assert within_patience(lambda: figures_on(page_of(queue, jobs, tmp_path)))


def test_a_sync_that_hangs_holds_up_no_scrape(tmp_path: Path) -> None:
    disk = GatedDisk()
    with JournaledQueue(tmp_path, "stuck", sync="always", disk=disk) as queue:
        disk.gate.clear()
        future = queue.put_future(b"x")
        try:
            assert disk.started.acquire(timeout=PATIENCE)
            figures: dict[Any, float] = {}
            assert within_patience(lambda: figures.update(figures_on(page_of(queue))))
            assert figure(figures, "kestrel_unsynced_items", queue="stuck") == 1
        finally:
            disk.gate.set()
        future.result(PATIENCE)


def test_counters_do_not_go_back_while_jobs_end() -> None:
    with WorkQueue(None, "jobs") as queue, queue.session() as session:
        over = threading.Event()
        seen: list[float] = []

        def work() -> None:
            for _ in range(2_000):
                queue.put(b"x")
                session.reserve(timeout=0).delete()
            over.set()

        registry = CollectorRegistry()
        registry.register(Collector(queue))
        thread = threading.Thread(target=work)
        thread.start()
        while not over.is_set():
            figures = figures_on(generate_latest(registry).decode())
            seen.append(figure(figures, "kestrel_job_reservations_total", queue="jobs"))
        thread.join()
        assert seen == sorted(seen)
        figures = figures_on(generate_latest(registry).decode())
        assert figure(figures, "kestrel_job_reservations_total", queue="jobs") == 2_000


# -- refusals, waits, checkpoints --------------------------------------------------------------------------------------


def test_every_way_to_put_counts_its_refusals_once(tmp_path: Path) -> None:
    config = ReaderConfig(max_items=1, full_policy=FullPolicy.BLOCK)
    with JournaledQueue(tmp_path, "full", default_reader=config) as queue:
        queue.put(b"x")
        puts: list[Callable[[], object]] = [
            lambda: queue.put(b"y", timeout=0),
            lambda: queue.put(b"y", timeout=0.001),
            lambda: queue.put_many([b"y"], timeout=0),
            lambda: queue.put_future(b"y"),
            lambda: asyncio.run(queue.aput(b"y", timeout=0)),
            lambda: asyncio.run(queue.aput(b"y", timeout=0.001)),
        ]
        for count, put in enumerate(puts, 1):
            with pytest.raises(QueueFull):
                put()
            assert figure(figures_on(page_of(queue)), "kestrel_refused_total", queue="full") == count
        with pytest.raises(ValueError, match="timeout"):
            queue.put(b"y", timeout=-1)
        assert queue.stats().refused == len(puts)


def test_a_full_disk_is_a_refusal(tmp_path: Path) -> None:
    disk = FailingDisk(MemoryDisk())
    with JournaledQueue(tmp_path, "full", disk=disk, sync="never") as queue:
        disk.arm(errno.ENOSPC, sticky=True, kinds={"create", "grow"})
        for _ in range(2):
            with pytest.raises(QueueDiskFull):
                queue.put(b"x")
        assert queue.stats().refused == 2
        disk.disarm()


def test_producers_in_line(tmp_path: Path) -> None:
    config = ReaderConfig(max_items=1, full_policy=FullPolicy.BLOCK)
    with JournaledQueue(tmp_path, "full", default_reader=config) as queue:
        queue.put(b"x")
        threads = [threading.Thread(target=queue.put, args=(b"y",), kwargs={"timeout": PATIENCE}) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: queue.stats().waiting_producers == 2)
        assert figure(figures_on(page_of(queue)), "kestrel_waiting_producers", queue="full") == 2
        for _ in threads:
            queue.get(timeout=PATIENCE).commit()
        for thread in threads:
            thread.join()
        assert queue.stats().waiting_producers == 0


def test_a_checkpoint_that_fails_is_counted(tmp_path: Path) -> None:
    disk = FailingDisk(MemoryDisk())
    with JournaledQueue(tmp_path, "jobs", disk=disk, sync="never") as queue:
        queue.put(b"x")
        queue.get().commit()
        disk.arm(errno.EIO, kinds={"write"})
        with pytest.raises(OSError, match="Input/output error"):
            queue.checkpoint()
        disk.disarm()
        figures = figures_on(page_of(queue))
        assert figure(figures, "kestrel_checkpoint_failures_total", queue="jobs", reader="") == 1
        queue.checkpoint()
        assert queue.reader().stats().checkpoint_failures == 1


# -- labels ------------------------------------------------------------------------------------------------------------


def test_two_collectors_in_one_registry(tmp_path: Path) -> None:
    with JournaledQueue(tmp_path / "a", "jobs") as one, JournaledQueue(tmp_path / "b", "jobs") as two:
        one.put(b"x")
        registry = CollectorRegistry()
        registry.register(Collector(one, labels={"app": "a"}))
        registry.register(Collector(two, labels={"app": "b"}))
        figures = figures_on(generate_latest(registry).decode())
        assert figure(figures, "kestrel_put_total", queue="jobs", app="a") == 1
        assert figure(figures, "kestrel_put_total", queue="jobs", app="b") == 0


def test_queues_of_several_folders_are_told_apart(tmp_path: Path) -> None:
    with JournaledQueue(tmp_path / "a", "jobs") as one, JournaledQueue(tmp_path / "b", "jobs") as two:
        two.put(b"x")
        figures = figures_on(page_of(one, two))
        folders = [str(tmp_path / each) for each in "ab"]
        assert [figure(figures, "kestrel_put_total", queue="jobs", directory=each) for each in folders] == [0, 1]
        (tmp_path / "link").symlink_to(tmp_path / "a")
        assert "directory" not in page_of(one, tmp_path / "link"), "two names of one folder"
        with WorkQueue(None, "mail") as mail, WorkQueue(None, "jobs") as clash:
            assert "directory" not in page_of(one, mail), "one of them has no folder"
            with pytest.raises(ValueError, match="'jobs' was given twice"):
                Collector(one, clash)
            figures = figures_on(page_of(clash, tmp_path / "a"))
            assert about(figures, queue="jobs", state="ready"), "and the folder's queue of that name is hidden"


def test_hostile_values_are_escaped() -> None:
    evil = 'a"} 1\nkestrel_up{queue="\\'
    with WorkQueue(None, "jobs") as queue:
        queue.put(b"x", tube="x")
        figures = figures_on(page_of(queue, labels={"app": evil}))
        assert figure(figures, "kestrel_jobs", queue="jobs", tube="x", state="ready", app=evil) == 1
        assert figure(figures, "kestrel_up", queue="jobs", app=evil) == 1


@pytest.mark.parametrize("name", ["", "0a", "a-b", "a b", "__a", "queue", "reader", "le", "directory", "ä", "a\n"])
def test_labels_that_can_not_be(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="labels"):
        Collector(tmp_path, labels={name: "x"})


def test_targets_that_can_not_be(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="at least one"):
        Collector()
    for target in (None, 7, object(), [tmp_path]):
        with pytest.raises(TypeError, match="a queue, a work queue, a folder"):
            Collector(target)  # type: ignore[arg-type]
    for folder in ("", b"queues"):
        with pytest.raises((ValueError, TypeError)):
            Collector(folder)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="labels"):
        Collector(tmp_path, labels={"a": 1})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="no text"):
        Collector(tmp_path, labels={"a": "\ud800"})
    with WorkQueue(None, "jobs") as one, WorkQueue(None, "jobs") as two:
        with pytest.raises(ValueError, match="'jobs' was given twice"):
            Collector(one, two)
        with pytest.raises(ValueError, match="given twice"):
            Collector(one, one)


def test_nothing_is_read_before_the_first_scrape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with JournaledQueue(tmp_path, "jobs") as queue:
        calls: list[object] = []
        monkeypatch.setattr(JournaledQueue, "stats", lambda self: calls.append(self))
        for auto in (False, True):
            CollectorRegistry(auto_describe=auto).register(Collector(queue, tmp_path))
        assert calls == []
        page_of(queue)
        assert calls == [queue]


# -- folders -----------------------------------------------------------------------------------------------------------


def test_a_folder_has_what_others_have_open(tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "shared") as queue, WorkQueue(tmp_path, "jobs") as jobs:
        queue.put_many([b"one", b"three"])
        jobs.put(b"x")
        queue.reader("slow").close()
        with closing(open_reader(tmp_path, "shared", "other", create=True, start="earliest")) as other:
            other.get().commit()
            other.checkpoint()
            figures = figures_on(page_of(tmp_path))
            assert about(figures, queue="shared", reader="slow")["kestrel_lag_bytes"] == 8
            assert about(figures, queue="shared", reader="other")["kestrel_items"] == 1
            assert figure(figures, "kestrel_put_total", queue="shared") == 2
            assert figure(figures, "kestrel_segments", queue="jobs") == 1
            assert figure(figures, "kestrel_info", queue="jobs", kind="work queue", version=kestrelpy.__version__) == 1
            both = figures_on(page_of(queue, tmp_path))
            check_queue(queue, both)
            assert about(both, queue="shared", reader="other")["kestrel_items"] == 1


def test_what_waits_in_the_inbox(tmp_path: Path) -> None:
    with JournaledQueue(tmp_path, "shared", inbox_interval=None) as queue:
        for name in ("shared", "shred", "shred"):
            inbox.put_many(tmp_path, name, [b"x"])
        figures = figures_on(page_of(queue, tmp_path))
        assert figure(figures, "kestrel_pending_batches", queue="shared") == 1
        assert about(figures, queue="shred") == {"kestrel_pending_batches": 2}
        queue.take_in()
        inbox.take_in(tmp_path, "shred")
        figures = figures_on(page_of(queue, tmp_path))
        assert figure(figures, "kestrel_pending_batches", queue="shared") == 0
        assert figure(figures, "kestrel_pending_batches", queue="shred") == 0
        assert figure(figures, "kestrel_put_total", queue="shred") == 2
    segment = next(tmp_path.glob("shred.*.segment"))
    segment.write_bytes(b"\xff" * segment.stat().st_size)
    inbox.put_many(tmp_path, "shred", [b"y"])
    damaged = figures_on(page_of(tmp_path))
    assert about(damaged, queue="shred") == {"kestrel_up": 0, "kestrel_pending_batches": 1}


def test_an_inbox_that_can_not_be_read_has_no_figure(tmp_path: Path) -> None:
    JournaledQueue(tmp_path, "jobs").close()
    shutil.rmtree(tmp_path / "inbox", ignore_errors=True)
    (tmp_path / "inbox").write_bytes(b"no folder")
    figures = figures_on(page_of(tmp_path))
    assert figure(figures, "kestrel_up", queue="jobs") == 1
    assert "kestrel_pending_batches" not in about(figures, queue="jobs")


def test_queues_that_come_and_go(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    registry.register(Collector(tmp_path / "queues"))

    def up() -> dict[str, float]:
        found = figures_on(generate_latest(registry).decode())
        return {dict(labels)["queue"]: value for (name, labels), value in found.items() if name == "kestrel_up"}

    assert up() == {"": 0}, "there is no folder"
    with JournaledQueue(tmp_path / "queues", "one") as one:
        assert up() == {"one": 1}
        with JournaledQueue(tmp_path / "queues", "two") as two:
            assert up() == {"one": 1, "two": 1}
            one.erase()
            assert up() == {"two": 1}
            two.put(b"x")
    segment = next((tmp_path / "queues").glob("two.*.segment"))
    segment.write_bytes(b"\xff" * segment.stat().st_size)
    with JournaledQueue(tmp_path / "queues", "three"):
        assert up() == {"two": 0, "three": 1}


# -- a thousand queues -------------------------------------------------------------------------------------------------

QUEUES = 1_000
ROUNDS = 3
GOAL_SECONDS, MARGIN = 0.25, 4
"""What a scrape of so many queues may take, and how many times that it may work on a machine that others use, too."""


def timed(what: str, collector: Collector, between: Callable[[], object], tally: Tally) -> dict[str, float]:
    """Scrape several times, with something in between. The items that were put, by queue, at the last scrape."""
    times, worked = [], []
    for _ in range(ROUNDS):
        between()
        begun, work_begun = time.perf_counter(), time.thread_time()
        families = list(collector.collect())
        times.append(time.perf_counter() - begun)
        worked.append(time.thread_time() - work_begun)
    took, work = min(times) * 1000, min(worked) * 1000
    print(f"a scrape of {QUEUES:,} {what} takes {took:.0f} ms, of which this thread works for {work:.0f} ms")
    tally.add(f"milliseconds of a scrape of {QUEUES:,} {what}", round(took))
    assert work < GOAL_SECONDS * 1000 * MARGIN, what
    samples = (sample for each in families for sample in each.samples)
    return {sample.labels["queue"]: sample.value for sample in samples if sample.name == "kestrel_put_total"}


def test_a_thousand_open_queues(tmp_path: Path, tally: Tally) -> None:
    disk = MemoryDisk()
    with ExitStack() as opened:
        options: dict[str, Any] = {"sync": "never", "inbox_interval": None, "disk": disk}
        queues = [opened.enter_context(JournaledQueue(tmp_path, f"q{n}", **options)) for n in range(QUEUES)]
        for queue in queues:
            queue.reader()
        puts = timed("open queues", Collector(*queues), lambda: [queue.put(b"x" * 100) for queue in queues], tally)
        assert puts == {queue.name: ROUNDS for queue in queues}


def test_a_folder_of_a_thousand_queues(tmp_path: Path, tally: Tally) -> None:
    """The files of one live queue, a thousand times, and at each scrape with some items more."""
    one, many = tmp_path / "one", tmp_path / "many"
    many.mkdir()
    names = [f"q{n}" for n in range(QUEUES)]
    with JournaledQueue(one, "queue", sync="never", checkpoint_interval=1000) as queue:

        def put() -> None:
            queue.put_many([b"x" * 100] * 3)
            queue.get().commit()
            queue.checkpoint()
            for path in (*one.glob("*segment"), *one.glob("*.checkpoint")):
                data = path.read_bytes()
                for name in names:
                    (many / path.name.replace("queue", name)).write_bytes(data)

        puts = timed("queues of a folder", Collector(many), put, tally)
        assert puts == dict.fromkeys(names, 3 * ROUNDS)
