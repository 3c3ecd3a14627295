"""What the server does, command by command, over a real socket; where time must pass, it is told to.

The names in brackets are rows of the list of what beanstalkd does: commands (F), states (S), DEADLINE_SOON (D).
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kestrelpy.errors import QueueLocked
from kestrelpy.server import BeanstalkServer, KestrelServer, QueueServer, parse_address, serve_in_thread
from kestrelpy.server.beanstalk.commands import KICK_SLICE
from kestrelpy.testing import FailingDisk, ManualClock, MemoryDisk
from tests.server.beanstalk_harness import Client, Served, served


@pytest.fixture
def it(caplog: pytest.LogCaptureFixture) -> Iterator[Served]:
    with served() as one:
        yield one
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.fixture
def client(it: Served) -> Client:
    return it.client()


def put(client: Client, body: bytes, job_id: int, *, priority: int = 0, delay: int = 0, ttr: int = 100) -> None:
    client.ask(b"put %d %d %d %d\r\n%b\r\n" % (priority, delay, ttr, len(body), body), b"INSERTED %d\r\n" % job_id)


# -- commands --------------------------------------------------------------------------------------------------------


def test_put_and_its_refusals(it: Served, client: Client) -> None:  # (F1)
    put(client, b"hello", 1)
    client.ask(b"put 0 0 1 1\r\nabc", b"EXPECTED_CRLF\r\n")
    client.ask(b"put 0 0 1 65536\r\n" + b"x" * 65536 + b"\r\n", b"JOB_TOO_BIG\r\n")
    put(client, b"x" * 65535, 3)
    it.call(it.server.drain)
    client.ask(b"put 0 0 1 1\r\na\r\n", b"DRAINING\r\n")
    assert it.queue.stats().ready == 2


def test_ids_are_used_up_in_the_order_of_lines(it: Served) -> None:  # (L6)
    early, late = it.clients(2)
    early.send(b"put 0 0 1 1\r\n")
    it.until(lambda: it.queue.stats().last_id == 1)
    put(late, b"b", 2)
    early.ask(b"a\r\n", b"INSERTED 1\r\n")
    late.ask(b"peek 1\r\n", b"FOUND 1 1\r\na\r\n")


def test_a_put_is_counted_with_its_line(it: Served) -> None:  # (F1)
    client, other = it.clients(2)
    client.send(b"put 0 0 1 1\r\n")
    it.until(lambda: it.queue.stats().last_id == 1)
    assert other.figures(b"stats")["cmd-put"] == "1"
    client.ask(b"a\r\nput 0 0 1 70000\r\n", b"INSERTED 1\r\n")
    it.until(lambda: it.server.commands.counts["put"] == 2)
    client.ask(
        b"x" * 70_000 + b"\r\nput 0 0 1 1\r\nabcput 0 0 1 1\r\na\r\n", b"JOB_TOO_BIG\r\nEXPECTED_CRLF\r\nINSERTED 3\r\n"
    )
    assert other.figures(b"stats")["cmd-put"] == "4"


def test_a_refused_put_uses_up_an_id() -> None:  # (L6)
    with served(max_jobs=1) as it:
        client = it.client()
        put(client, b"a", 1)
        client.ask(b"put 0 0 1 1\r\nb\r\n", b"OUT_OF_MEMORY\r\n")
        client.ask(b"delete 1\r\n", b"DELETED\r\n")
        put(client, b"c", 3)


def test_use_makes_a_tube(it: Served, client: Client) -> None:  # (F2, F14, S6)
    client.ask(
        b"use a\r\nlist-tubes\r\nlist-tube-used\r\n", b"USING a\r\nOK 18\r\n---\n- default\n- a\n\r\nUSING a\r\n"
    )
    client.ask(b"use b\r\nlist-tubes\r\n", b"USING b\r\nOK 18\r\n---\n- default\n- b\n\r\n")


def test_reserve_takes_the_smallest_priority_and_id_over_all_tubes(client: Client) -> None:  # (F3)
    put(client, b"a", 1, priority=5)
    client.ask(b"use other\r\nwatch other\r\n", b"USING other\r\nWATCHING 2\r\n")
    put(client, b"b", 2, priority=4)
    put(client, b"c", 3, priority=5)
    client.ask(b"reserve\r\n" * 3, b"RESERVED 2 1\r\nb\r\nRESERVED 1 1\r\na\r\nRESERVED 3 1\r\nc\r\n")


def test_reserve_with_timeout(it: Served, client: Client) -> None:  # (F3)
    client.ask(b"reserve-with-timeout 0\r\n", b"TIMED_OUT\r\n")
    client.send(b"reserve-with-timeout 10\r\n")
    it.wait_for_waiting()
    it.advance(9.9)
    client.hear_nothing()
    it.advance(0.1)
    client.hear(b"TIMED_OUT\r\n")
    client.send(b"reserve-with-timeout 10\r\n")
    it.wait_for_waiting()
    put(it.client(), b"a", 1)
    client.hear(b"RESERVED 1 1\r\na\r\n")


def test_reserve_job(it: Served) -> None:  # (F4)
    client, other = it.clients(2)
    other.ask(b"use unwatched\r\n", b"USING unwatched\r\n")
    put(other, b"a", 1)
    put(other, b"b", 2, delay=10)
    put(other, b"c", 3)
    other.ask(b"reserve-job 3\r\nbury 3 0\r\n", b"RESERVED 3 1\r\nc\r\nBURIED\r\n")
    for job_id, body in ((1, b"a"), (2, b"b"), (3, b"c")):
        client.ask(b"reserve-job %d\r\n" % job_id, b"RESERVED %d 1\r\n%b\r\n" % (job_id, body))
        client.ask(b"reserve-job %d\r\n" % job_id, b"NOT_FOUND\r\n")
        other.ask(b"reserve-job %d\r\n" % job_id, b"NOT_FOUND\r\n")


def test_delete(it: Served) -> None:  # (F5)
    client, other = it.clients(2)
    put(client, b"ready", 1)
    put(client, b"delayed", 2, delay=9)
    put(client, b"mine", 3)
    put(client, b"buried", 4)
    client.ask(
        b"reserve-job 3\r\nreserve-job 4\r\nbury 4 0\r\n",
        b"RESERVED 3 4\r\nmine\r\nRESERVED 4 6\r\nburied\r\nBURIED\r\n",
    )
    other.ask(b"delete 1\r\ndelete 2\r\ndelete 3\r\ndelete 4\r\n", b"DELETED\r\nDELETED\r\nNOT_FOUND\r\nDELETED\r\n")
    client.ask(b"delete 3\r\ndelete 3\r\n", b"DELETED\r\nNOT_FOUND\r\n")


def test_release_bury_and_touch_are_for_ones_own_jobs(it: Served) -> None:  # (F6, F7, F8)
    client, other = it.clients(2)
    put(client, b"a", 1)
    client.ask(b"reserve\r\n", b"RESERVED 1 1\r\na\r\n")
    other.ask(b"release 1 0 0\r\nbury 1 0\r\ntouch 1\r\n", b"NOT_FOUND\r\n" * 3)
    client.ask(b"touch 1\r\nrelease 1 7 0\r\n", b"TOUCHED\r\nRELEASED\r\n")
    assert client.figures(b"stats-job 1")["pri"] == "7"
    client.ask(b"touch 1\r\nrelease 1 7 0\r\nbury 1 0\r\n", b"NOT_FOUND\r\n" * 3)
    client.ask(b"reserve\r\nrelease 1 7 5\r\npeek-delayed\r\n", b"RESERVED 1 1\r\na\r\nRELEASED\r\nFOUND 1 1\r\na\r\n")
    it.advance(5)
    client.ask(b"reserve\r\nbury 1 9\r\npeek-buried\r\n", b"RESERVED 1 1\r\na\r\nBURIED\r\nFOUND 1 1\r\na\r\n")
    assert client.figures(b"stats-job 1")["pri"] == "9"


def test_the_buried_stand_in_line(client: Client) -> None:  # (F7)
    for job_id in (1, 2, 3):
        put(client, b"x", job_id)
    client.ask(b"reserve-job 2\r\nreserve-job 1\r\n", b"RESERVED 2 1\r\nx\r\nRESERVED 1 1\r\nx\r\n")
    client.ask(b"bury 2 0\r\nbury 1 0\r\n", b"BURIED\r\n" * 2)
    client.ask(b"peek-buried\r\nkick 1\r\npeek-buried\r\n", b"FOUND 2 1\r\nx\r\nKICKED 1\r\nFOUND 1 1\r\nx\r\n")


def test_touch_begins_the_time_to_run_anew(it: Served, client: Client) -> None:  # (F8)
    put(client, b"a", 1, ttr=10)
    client.ask(b"reserve\r\n", b"RESERVED 1 1\r\na\r\n")
    it.advance(8)
    client.ask(b"touch 1\r\n", b"TOUCHED\r\n")
    it.advance(8)
    assert client.figures(b"stats-job 1")["time-left"] == "2"
    client.ask(b"delete 1\r\n", b"DELETED\r\n")


def test_watch_and_ignore(client: Client) -> None:  # (F9)
    client.ask(b"ignore default\r\nignore nothing\r\n", b"NOT_IGNORED\r\nWATCHING 1\r\n")
    client.ask(b"watch a\r\nwatch a\r\nwatch b\r\n", b"WATCHING 2\r\nWATCHING 2\r\nWATCHING 3\r\n")
    client.ask(b"list-tubes-watched\r\n", b"OK 22\r\n---\n- default\n- a\n- b\n\r\n")
    client.ask(b"ignore default\r\nlist-tubes-watched\r\n", b"WATCHING 2\r\nOK 12\r\n---\n- b\n- a\n\r\n")


def test_peeks(client: Client) -> None:  # (F10)
    client.ask(b"peek 1\r\npeek-ready\r\npeek-delayed\r\npeek-buried\r\n", b"NOT_FOUND\r\n" * 4)
    put(client, b"late", 1, delay=20)
    put(client, b"soon", 2, delay=10)
    put(client, b"b", 3, priority=2)
    put(client, b"a", 4, priority=1)
    client.ask(
        b"peek 1\r\npeek-ready\r\npeek-delayed\r\n", b"FOUND 1 4\r\nlate\r\nFOUND 4 1\r\na\r\nFOUND 2 4\r\nsoon\r\n"
    )
    client.ask(b"use other\r\npeek-ready\r\n", b"USING other\r\nNOT_FOUND\r\n")


def test_kick_takes_buried_ones_first(client: Client) -> None:  # (F11)
    for job_id in (1, 2, 3):
        put(client, b"x", job_id, delay=100)
    client.ask(b"reserve-job 3\r\nbury 3 0\r\n", b"RESERVED 3 1\r\nx\r\nBURIED\r\n")
    client.ask(b"kick 10\r\nkick 1\r\nkick 10\r\nkick 10\r\n", b"KICKED 1\r\nKICKED 1\r\nKICKED 1\r\nKICKED 0\r\n")


def test_a_large_kick_takes_buried_ones_only_too(client: Client) -> None:  # (F11)
    for job_id in range(1, 1001):
        put(client, b"x", job_id, delay=100)
    for job_id in range(1, 501):
        client.ask(b"reserve-job %d\r\nbury %d 0\r\n" % (job_id, job_id), b"RESERVED %d 1\r\nx\r\nBURIED\r\n" % job_id)
    client.ask(b"kick 4294967295\r\nkick 450\r\n", b"KICKED 500\r\nKICKED 450\r\n")
    client.ask(b"kick -1\r\nkick -1\r\n", b"KICKED 50\r\nKICKED 0\r\n")


def test_a_large_kick_does_not_change_over(it: Served, client: Client) -> None:  # (F11)
    """What there was at its beginning is what it kicks, even if there is more of the other kind when it goes on."""

    def kick_with_a_change(change: Callable[[], object]) -> list[bytes | None]:
        long_command = it.server.commands._kick_many("default", 1000)
        first = next(long_command)
        change()
        return [first, next(long_command)]

    it.call(lambda: it.queue.put_many([b"x"] * (2 * KICK_SLICE), delay=100))
    with it.queue.session() as session:
        bury = it.queue.put(b"buried", delay=100)
        session.reserve_job(bury)
        assert it.call(lambda: kick_with_a_change(lambda: session.bury(bury))) == [None, b"KICKED %d\r\n" % KICK_SLICE]
    assert it.call(lambda: it.queue.stats()).buried == 1
    it.queue.kick_job(bury)
    with it.queue.session() as session:
        for job in session.reserve_many(KICK_SLICE):
            job.bury()
    assert it.call(lambda: kick_with_a_change(lambda: None)) == [None, b"KICKED %d\r\n" % KICK_SLICE]
    assert it.call(lambda: it.queue.stats()).delayed == KICK_SLICE


def test_kick_job(client: Client) -> None:  # (F12)
    put(client, b"x", 1, delay=100)
    client.ask(
        b"use elsewhere\r\nkick-job 1\r\nkick-job 1\r\nkick-job 2\r\n",
        b"USING elsewhere\r\nKICKED\r\n" + b"NOT_FOUND\r\n" * 2,
    )


def test_figures(it: Served, client: Client) -> None:  # (F13)
    put(client, b"a", 1, priority=1023)
    put(client, b"b", 2, priority=1024, delay=10, ttr=20)
    it.advance(3)
    job = client.figures(b"stats-job 2")
    keys = "id tube state pri age delay ttr time-left file reserves timeouts releases buries kicks"
    assert " ".join(job) == keys
    assert job["state"] == "delayed"
    assert (job["age"], job["delay"], job["ttr"], job["time-left"]) == ("3", "10", "20", "7")
    tube = client.figures(b"stats-tube default")
    assert (tube["current-jobs-urgent"], tube["current-jobs-ready"], tube["current-jobs-delayed"]) == ("1", "1", "1")
    assert (tube["current-using"], tube["current-watching"]) == ("1", "1")
    client.ask(b"stats-job 3\r\nstats-tube nowhere\r\n", b"NOT_FOUND\r\n" * 2)
    everything = client.figures(b"stats")
    assert everything["version"] == '"1.12+kestrelpy"'
    assert everything["max-job-size"] == "65535"
    assert (everything["cmd-put"], everything["cmd-stats-job"], everything["cmd-stats-tube"]) == ("2", "2", "2")
    assert (everything["total-jobs"], everything["uptime"], everything["draining"]) == ("2", "3", "false")
    it.call(it.server.drain)
    assert client.figures(b"stats")["draining"] == "true"


STATS_KEYS = (
    "current-jobs-urgent current-jobs-ready current-jobs-reserved current-jobs-delayed current-jobs-buried cmd-put "
    "cmd-peek cmd-peek-ready cmd-peek-delayed cmd-peek-buried cmd-reserve cmd-reserve-with-timeout cmd-delete "
    "cmd-release cmd-use cmd-watch cmd-ignore cmd-bury cmd-kick cmd-touch cmd-stats cmd-stats-job cmd-stats-tube "
    "cmd-list-tubes cmd-list-tube-used cmd-list-tubes-watched cmd-pause-tube job-timeouts total-jobs max-job-size "
    "current-tubes current-connections current-producers current-workers current-waiting total-connections pid version "
    "rusage-utime rusage-stime uptime binlog-oldest-index binlog-current-index binlog-records-migrated "
    "binlog-records-written binlog-max-size draining id hostname os platform"
)


def test_the_figures_of_the_server_are_in_their_order(client: Client) -> None:  # (F13)
    assert " ".join(client.figures(b"stats")) == STATS_KEYS


def test_clients_are_counted(it: Served) -> None:  # (F13)
    watcher, producer, worker, gone = it.clients(4)
    gone.hang_up()
    put(producer, b"a", 1)
    worker.send(b"reserve\r\n" * 2)
    it.wait_for_waiting()
    it.until(lambda: len(it.server.connections) == 3)
    figures = watcher.figures(b"stats")
    assert figures["current-connections"] == "3"
    assert figures["total-connections"] == "4"
    assert (figures["current-producers"], figures["current-workers"], figures["current-waiting"]) == ("1", "1", "1")


def test_pause_tube(it: Served) -> None:  # (F15, S8)
    client, waiting = it.clients(2)
    put(client, b"a", 1)
    client.ask(b"pause-tube default 10\r\npause-tube nowhere 1\r\n", b"PAUSED\r\nNOT_FOUND\r\n")
    client.ask(b"reserve-with-timeout 0\r\n", b"TIMED_OUT\r\n")
    put(client, b"b", 2)
    waiting.send(b"reserve\r\n")
    it.wait_for_waiting()
    client.ask(b"peek 1\r\ndelete 1\r\n", b"FOUND 1 1\r\na\r\nDELETED\r\n")
    assert client.figures(b"stats-tube default")["pause-time-left"] == "10"
    it.advance(10)
    waiting.hear(b"RESERVED 2 1\r\nb\r\n")
    client.ask(b"pause-tube default 10\r\n", b"PAUSED\r\n")
    put(client, b"c", 3)
    waiting.send(b"reserve\r\n")
    it.wait_for_waiting()
    client.ask(b"pause-tube default 0\r\n", b"PAUSED\r\n")
    waiting.hear(b"RESERVED 3 1\r\nc\r\n")


def test_quit(it: Served, client: Client) -> None:  # (F16, S3)
    put(client, b"a", 1)
    client.ask(b"reserve\r\nquit\r\nstats\r\n", b"RESERVED 1 1\r\na\r\n")
    client.hear_the_end()
    it.client().ask(b"reserve\r\n", b"RESERVED 1 1\r\na\r\n")


# -- states ----------------------------------------------------------------------------------------------------------


def test_a_job_is_ready_again_when_its_time_to_run_is_over(it: Served) -> None:  # (S2)
    client, other = it.clients(2)
    put(client, b"a", 1, ttr=10)
    client.ask(b"reserve\r\n", b"RESERVED 1 1\r\na\r\n")
    other.send(b"reserve\r\n")
    it.wait_for_waiting()
    it.advance(10)
    other.hear(b"RESERVED 1 1\r\na\r\n")
    client.ask(b"delete 1\r\n", b"NOT_FOUND\r\n")
    figures = other.figures(b"stats-job 1")
    assert (figures["timeouts"], figures["reserves"], figures["releases"]) == ("1", "2", "0")
    assert other.figures(b"stats")["job-timeouts"] == "1"


def test_a_delayed_job_is_ready_in_time(it: Served, client: Client) -> None:  # (S1)
    put(client, b"a", 1, delay=10)
    client.send(b"reserve\r\n")
    it.wait_for_waiting()
    it.advance(9)
    client.hear_nothing()
    it.advance(1)
    client.hear(b"RESERVED 1 1\r\na\r\n")


def test_who_hangs_up_gives_its_jobs_back(it: Served) -> None:  # (S3)
    client, other = it.clients(2)
    put(client, b"a", 1)
    client.ask(b"reserve\r\n", b"RESERVED 1 1\r\na\r\n")
    other.send(b"reserve\r\n")
    it.wait_for_waiting()
    client.hang_up()
    other.hear(b"RESERVED 1 1\r\na\r\n")
    figures = other.figures(b"stats-job 1")
    assert (figures["timeouts"], figures["releases"], figures["reserves"]) == ("0", "0", "2")


def test_who_hangs_up_while_it_waits_gets_no_job(it: Served) -> None:  # (S3)
    client, other = it.clients(2)
    client.send(b"reserve\r\n")
    it.wait_for_waiting()
    client.hang_up()
    it.wait_for_waiting(0)
    put(other, b"a", 1)
    other.ask(b"reserve\r\n", b"RESERVED 1 1\r\na\r\n")


def test_who_closes_one_way_and_waits_is_told_at_once(it: Served) -> None:  # (S4)
    client = it.client()
    client.send(b"reserve\r\n")
    it.wait_for_waiting()
    client.half_close()
    client.hear(b"TIMED_OUT\r\n")
    client.hear_the_end()
    for said in (b"reserve\r\n", b"reserve-with-timeout 100\r\n"):
        client = it.client()
        client.send(said * 2 + b"use a\r\nuse unfinished")
        client.half_close()
        client.hear(b"TIMED_OUT\r\nTIMED_OUT\r\nUSING a\r\n")
        client.hear_the_end()


def test_who_closes_one_way_gets_what_is_ready(it: Served) -> None:  # (S4)
    client, other = it.clients(2)
    put(other, b"a", 1)
    client.send(b"reserve\r\n")
    client.half_close()
    client.hear(b"RESERVED 1 1\r\na\r\n")
    client.hear_the_end()


def test_what_is_sent_behind_a_reserve_waits(it: Served) -> None:  # (S5)
    client, other = it.clients(2)
    client.send(b"reserve\r\ndelete 1\r\nuse a\r\n")
    it.wait_for_waiting()
    client.hear_nothing()
    put(other, b"a", 1)
    client.hear(b"RESERVED 1 1\r\na\r\nDELETED\r\nUSING a\r\n")


def test_tubes_vanish(it: Served) -> None:  # (S6)
    client, other = it.clients(2)
    other.ask(b"watch a\r\nuse b\r\n", b"WATCHING 2\r\nUSING b\r\n")
    put(other, b"x", 1)
    client.ask(b"list-tubes\r\n", b"OK 22\r\n---\n- default\n- a\n- b\n\r\n")
    other.hang_up()
    it.until(lambda: it.queue.tubes() == ["default", "b"])
    client.ask(b"delete 1\r\nlist-tubes\r\n", b"DELETED\r\nOK 14\r\n---\n- default\n\r\n")


def test_the_first_to_wait_is_the_first_to_be_served(it: Served) -> None:  # (S7, better than beanstalkd)
    waiting = it.clients(6)
    for number, client in enumerate(waiting, 1):
        client.send(b"reserve\r\n")
        it.wait_for_waiting(number)
    producer = it.client()
    for job_id, client in enumerate(waiting, 1):
        put(producer, b"x", job_id)
        client.hear(b"RESERVED %d 1\r\nx\r\n" % job_id)


def test_all_but_put_goes_on_when_draining(it: Served, client: Client) -> None:  # (S9)
    put(client, b"a", 1)
    it.call(it.server.drain)
    client.ask(b"put 0 0 1 1\r\na\r\nput 0 0 1 1\r\nabc", b"DRAINING\r\nEXPECTED_CRLF\r\n")
    client.ask(b"reserve\r\nrelease 1 0 0\r\nreserve\r\n", b"RESERVED 1 1\r\na\r\nRELEASED\r\nRESERVED 1 1\r\na\r\n")
    client.ask(b"delete 1\r\n", b"DELETED\r\n")


def test_counters_of_a_job(it: Served, client: Client) -> None:  # (S10)
    put(client, b"a", 1)
    for _ in range(2):
        client.ask(b"reserve\r\nrelease 1 0 0\r\n", b"RESERVED 1 1\r\na\r\nRELEASED\r\n")
    for _ in range(3):
        client.ask(b"reserve\r\nbury 1 0\r\nkick 1\r\n", b"RESERVED 1 1\r\na\r\nBURIED\r\nKICKED 1\r\n")
    figures = client.figures(b"stats-job 1")
    assert [figures[key] for key in ("reserves", "timeouts", "releases", "buries", "kicks")] == [
        "5",
        "0",
        "2",
        "3",
        "3",
    ]


# -- DEADLINE_SOON ---------------------------------------------------------------------------------------------------


def test_deadline_soon(it: Served) -> None:  # (D2, D3, D6, D7, D9, D12)
    client, other = it.clients(2)
    put(client, b"a", 1, ttr=1)
    put(client, b"b", 2, delay=100)
    client.ask(b"reserve\r\n", b"RESERVED 1 1\r\na\r\n")
    client.ask(b"reserve\r\nreserve-with-timeout 0\r\n", b"DEADLINE_SOON\r\n" * 2)
    other.ask(b"reserve-with-timeout 0\r\n", b"TIMED_OUT\r\n")
    client.ask(b"reserve-job 2\r\ntouch 1\r\n", b"RESERVED 2 1\r\nb\r\nTOUCHED\r\n")
    put(other, b"c", 3)
    client.ask(b"reserve\r\ndelete 1\r\n", b"RESERVED 3 1\r\nc\r\nDELETED\r\n")


def test_deadline_soon_while_waiting(it: Served, client: Client) -> None:  # (D1, D4, D5)
    put(client, b"a", 1, ttr=10)
    client.ask(b"reserve\r\n", b"RESERVED 1 1\r\na\r\n")
    client.send(b"reserve\r\ndelete 1\r\n")
    it.wait_for_waiting()
    it.advance(8.9)
    client.hear_nothing()
    it.advance(0.1)
    client.hear(b"DEADLINE_SOON\r\nDELETED\r\n")


# -- beyond one connection -------------------------------------------------------------------------------------------


def test_states_survive_a_restart(tmp_path: Path) -> None:
    clock = ManualClock(1_700_000_000_000)
    with served(tmp_path, clock=clock) as it:
        client = it.client()
        client.ask(b"use work\r\nwatch work\r\n", b"USING work\r\nWATCHING 2\r\n")
        put(client, b"ready", 1, priority=7)
        put(client, b"delayed", 2, delay=100)
        put(client, b"buried", 3)
        put(client, b"reserved", 4, priority=3)
        put(client, b"gone", 5)
        client.ask(b"reserve-job 3\r\nbury 3 11\r\ndelete 5\r\n", b"RESERVED 3 6\r\nburied\r\nBURIED\r\nDELETED\r\n")
        client.ask(b"reserve-job 4\r\n", b"RESERVED 4 8\r\nreserved\r\n")
        client.ask(b"pause-tube default 1000\r\n", b"PAUSED\r\n")
    clock.advance(40)
    with served(tmp_path, clock=clock) as it:
        client = it.client()
        states = {n: client.figures(b"stats-job %d" % n) for n in (1, 2, 3, 4)}
        assert [one["state"] for one in states.values()] == ["ready", "delayed", "buried", "ready"]
        assert [one["pri"] for one in states.values()] == ["7", "0", "11", "3"]
        assert states[2]["time-left"] == "60"
        assert states[3]["buries"] == "1"
        client.ask(b"stats-job 5\r\nuse work\r\npeek-buried\r\n", b"NOT_FOUND\r\nUSING work\r\nFOUND 3 6\r\nburied\r\n")
        client.ask(
            b"watch work\r\nreserve\r\nreserve\r\n",
            b"WATCHING 2\r\nRESERVED 4 8\r\nreserved\r\nRESERVED 1 5\r\nready\r\n",
        )
        put(client, b"new", 6)


def test_a_program_and_its_clients_share_the_queue(it: Served, client: Client) -> None:
    client.send(b"reserve\r\nuse a\r\n")
    it.wait_for_waiting()
    assert it.queue.put(b"from here") == 1  # in another thread than the server's
    client.hear(b"RESERVED 1 9\r\nfrom here\r\nUSING a\r\n")
    put(client, b"from there", 2)
    with it.queue.session() as session:
        session.watch("a")
        assert session.reserve(0).body == b"from there"


def test_max_attempts_buries() -> None:
    with served(max_attempts=2) as it:
        client = it.client()
        put(client, b"a", 1)
        client.ask(b"reserve\r\nrelease 1 0 0\r\n", b"RESERVED 1 1\r\na\r\nRELEASED\r\n")
        client.ask(b"reserve\r\nrelease 1 0 0\r\npeek-buried\r\n", b"RESERVED 1 1\r\na\r\nBURIED\r\nFOUND 1 1\r\na\r\n")


def test_it_listens_at_a_path(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    for _ in range(2):  # what an earlier one left there is replaced
        with serve_in_thread(listen=f"unix:{path}") as server:
            assert server.addresses == [path]
            client = Client(path)
            client.ask(b"use a\r\n", b"USING a\r\n")
            client.hang_up()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:5", ("127.0.0.1", 5)),
        ("127.0.0.1", ("127.0.0.1", 11300)),
        ("[::1]:5", ("::1", 5)),
        ("::1", ("::1", 11300)),
        (":5", ("", 5)),
        ("unix:/run/x", "/run/x"),
    ],
)
def test_addresses(text: str, address: object) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["unix:", "a:b", "a:65536", "a:-1", "a:"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"port|path"):
        parse_address(text)


def test_it_says_why_it_does_not_start(it: Served, tmp_path: Path) -> None:
    host, port = it.server.addresses[0]
    with pytest.raises(OSError, match="in use"), serve_in_thread(tmp_path, listen=f"{host}:{port}"):
        pass
    with serve_in_thread(tmp_path), pytest.raises(QueueLocked), serve_in_thread(tmp_path):
        pass
    with serve_in_thread(tmp_path):
        pass  # neither left anything open


def test_it_runs_in_a_loop_of_somebody_elses() -> None:
    async def run() -> tuple[bytes, bytes]:
        async with BeanstalkServer(listen="127.0.0.1:0") as server:
            reader, writer = await asyncio.open_connection(*server.addresses[0])
            writer.write(b"put 0 0 1 1\r\na\r\nreserve\r\nreserve-with-timeout 1\r\n")
            said = await reader.readexactly(len(b"INSERTED 1\r\nRESERVED 1 1\r\na\r\nDEADLINE_SOON\r\n"))
        rest = await reader.read()
        writer.close()
        return said, rest

    assert asyncio.run(run()) == (b"INSERTED 1\r\nRESERVED 1 1\r\na\r\nDEADLINE_SOON\r\n", b"")


def test_real_time_passes_too() -> None:
    with serve_in_thread() as server:
        client = Client(server.addresses[0])
        client.ask(b"put 0 1 1 1\r\na\r\nreserve-with-timeout 5\r\n", b"INSERTED 1\r\nRESERVED 1 1\r\na\r\n")
        client.hang_up()


# -- replies that mean what they say ---------------------------------------------------------------------------------


class _CountedSyncs:
    """The server's syncs, counted; each waits while ``gate`` is shut, and raises ``error`` if there is one."""

    def __init__(self, it: Served) -> None:
        self.count = 0
        self.gate = threading.Event()
        self.gate.set()
        self.error: OSError | None = None
        self._sync: Callable[[], None] = it.queue.sync
        it.queue.sync = self  # type: ignore[method-assign]

    def __call__(self) -> None:
        self.count += 1
        self.gate.wait()
        if self.error is not None:
            raise self.error
        self._sync()


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, sync="always") as one:
        yield one


def test_a_reply_waits_for_the_sync_and_one_sync_is_for_all(durable: Served) -> None:
    syncs = _CountedSyncs(durable)
    first, *others = durable.clients(10)
    syncs.gate.clear()
    first.send(b"put 0 0 1 1\r\na\r\n")
    durable_until = threading.Event()
    while syncs.count == 0:
        durable_until.wait(0.002)
    for client in others:
        client.send(b"put 0 0 1 1\r\na\r\nuse a\r\nput 0 0 1 1\r\nb\r\n")
    first.hear_nothing()
    syncs.gate.set()
    first.hear(b"INSERTED 1\r\n")
    heard = sorted(client.line() for client in others)
    assert heard == sorted(b"INSERTED %d\r\n" % number for number in range(2, 20, 2))
    assert syncs.count <= 4


def test_there_is_no_sync_where_nothing_was_written(durable: Served) -> None:
    syncs = _CountedSyncs(durable)
    client = durable.client()
    client.ask(b"use a\r\npeek 1\r\nreserve-with-timeout 0\r\n", b"USING a\r\nNOT_FOUND\r\nTIMED_OUT\r\n")
    assert syncs.count == 0
    put(client, b"a", 1)
    assert syncs.count == 1


def test_a_sync_that_fails_is_an_error_to_all_and_the_end(durable: Served) -> None:
    syncs = _CountedSyncs(durable)
    syncs.error = OSError(5, "Input/output error")
    client = durable.client()
    client.ask(b"put 0 0 1 1\r\na\r\nuse a\r\n", b"INTERNAL_ERROR\r\n" * 2)
    failed = asyncio.run_coroutine_threadsafe(durable.server.ended(), durable.server.loop)
    with pytest.raises(OSError, match="Input/output"):
        failed.result(10)


def test_a_full_disk_is_out_of_memory() -> None:
    disk = FailingDisk(MemoryDisk())
    with served("queues", disk=disk, segment_bytes=1 << 20) as it:
        client = it.client()
        put(client, b"a", 1)
        disk.arm(errno.ENOSPC, sticky=True, kinds=("create", "grow"))
        body = b"x" * 60_000
        for job_id in range(2, 19):  # as many as a segment has room for
            client.send(b"put 1 0 1 60000\r\n" + body + b"\r\n")
            if (heard := client.line()) != b"INSERTED %d\r\n" % job_id:
                break
        assert heard == b"OUT_OF_MEMORY\r\n"
        client.ask(b"reserve\r\ndelete 1\r\n", b"RESERVED 1 1\r\na\r\nDELETED\r\n")
        disk.disarm()
        client.ask(b"put 1 0 1 60000\r\n" + body + b"\r\n", b"INSERTED %d\r\n" % (job_id + 1))


@pytest.mark.parametrize("kind", [BeanstalkServer, KestrelServer])
def test_a_server_that_was_never_started_can_be_stopped(kind: type[QueueServer]) -> None:
    asyncio.run(kind(listen="127.0.0.1:0").stop())  # type: ignore[call-arg]
