"""SIGKILL at any moment of a process that works on a work queue: every job is as the last call about it has left it.

A worker announces each call before it is made and what it returned after that, through a pipe. It is killed, and the
next one tells all that it finds before it goes on: that is held against what was told before. What was under way may
have happened, as a whole, or not. Delays and times to run are longer than any run, but for some jobs, that time out.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from kestrelpy import QueueEmpty
from kestrelpy.work import WorkQueue
from tests.processes.programs import as_program, rounds
from tests.support.queues import Sync

TUBES = ("default", "left", "right")
LONG = 100_000.0
SHORT = 0.004
MOST = 40
"""So many jobs live at the most, or a few more."""
CALLS_PER_KILL = 10
"""So many there must be, or more: else nothing much was killed."""
Jobs = dict[int, dict[str, Any]]


# -- the worker ------------------------------------------------------------------------------------------------------


class Worker:
    """Calls on a queue, each announced; never ends by itself."""

    def __init__(self, folder: str, pipe: int, seed: int, generation: int) -> None:
        self.pipe = pipe
        self.choose = random.Random(f"{seed} {generation}")
        self.generation = generation
        self.serial = 0
        syncs: tuple[Sync, ...] = ("never", 0.01, "never", "always")
        sync = syncs[generation % 4]
        self.queue = WorkQueue(folder, sync=sync, segment_bytes=1 << 14, max_job_bytes=4000, checkpoint_interval=0.02)
        self.session = self.queue.session(deadline_soon=False)
        for tube in TUBES:
            self.session.watch(tube)

    def tell(self, message: dict[str, Any]) -> None:
        os.write(self.pipe, json.dumps(message).encode() + b"\n")

    def look(self) -> None:
        queue = self.queue
        queue._check()
        for tube in queue.tubes():
            for stats in queue.jobs(tube):
                body = queue.peek(stats.id).body
                assert len(body) == stats.body_bytes
                self.tell(
                    {
                        "found": stats.id, "token": body.split(b"|")[0].decode(), "tube": tube, "state": stats.state,
                        "priority": stats.priority, "ttr": stats.ttr, "timeouts": stats.timeouts,
                        "releases": stats.releases, "buries": stats.buries, "kicks": stats.kicks,
                    }
                )  # fmt: skip
            self.tell({"buried": [stats.id for stats in queue.jobs(tube, "buried")]})
        figures = queue.stats()
        self.tell({"total_jobs": figures.total_jobs, "last_id": figures.last_id, "segments": figures.segments})

    def call(self, announced: dict[str, Any], call: Callable[[], Any]) -> None:
        self.tell(announced)
        result = call()
        self.tell({"returned": list(result) if isinstance(result, range) else result})

    def body(self, token: str) -> bytes:
        return token.encode() + b"|" + bytes(self.choose.choice((0, 10, 300, 2000)))

    def token(self) -> str:
        self.serial += 1
        return f"{self.generation}.{self.serial}"

    def work(self) -> None:
        self.look()
        while True:
            held, count = self.session.reserved, sum(self.queue.stats_tube(tube).ready for tube in self.queue.tubes())
            stats = self.queue.stats()
            lives = count + len(held) + stats.delayed + stats.buried
            if held and self.choose.random() < 0.6:
                self.end(self.choose.choice(held))
            elif self.choose.random() < (0.6 if lives < MOST else 0.0):
                self.put()
            elif self.choose.random() < 0.5:
                self.other()
            else:
                self.take()

    def put(self) -> None:
        choose, queue = self.choose, self.queue
        how: dict[str, Any] = {
            "tube": choose.choice(TUBES),
            "priority": choose.randrange(3),
            "delay": choose.choice((0, 0, LONG)),
            "ttr": SHORT if choose.random() < 0.05 else LONG,
        }
        tokens = [self.token() for _ in range(choose.choice((1, 1, 1, 4)))]
        bodies = [self.body(token) for token in tokens]
        announced = {"op": "put", "tokens": tokens, **how}
        if len(tokens) > 1:
            self.call(announced, lambda: queue.put_many(bodies, **how))
        else:
            self.call(announced, lambda: queue.put(bodies[0], **how))

    def take(self) -> None:
        with contextlib.suppress(QueueEmpty):
            self.session.reserve(0)

    def end(self, job_id: int) -> None:
        """Delete, release or bury it; one that has little time is left to its timeout, and deleted then or later."""
        priority, session = self.choose.randrange(3), self.session
        if self.queue.stats_job(job_id).ttr < LONG:
            time.sleep(2 * SHORT)
            if self.choose.random() < 0.5:
                self.call({"op": "delete", "id": job_id}, lambda: session.delete(job_id))
            return
        op = self.choose.choice(("delete", "delete", "release", "delay", "bury"))
        if op == "delete":
            self.call({"op": op, "id": job_id}, lambda: session.delete(job_id))
        elif op == "bury":
            self.call({"op": op, "id": job_id, "priority": priority}, lambda: session.bury(job_id, priority))
        else:
            delay = LONG if op == "delay" else 0.0
            announced = {"op": "release", "id": job_id, "priority": priority, "delay": delay}
            self.call(announced, lambda: session.release(job_id, priority, delay))

    def other(self) -> None:
        """Something about a job that is delayed or buried."""
        queue, tube = self.queue, self.choose.choice(TUBES)
        state = self.choose.choice(("delayed", "buried"))
        found = [stats.id for stats in queue.jobs(tube, state)]
        if found:
            job_id = self.choose.choice(found)
            op = self.choose.choice(("delete", "kick_job", "move"))
            if op == "move":
                target = self.choose.choice(TUBES)
                self.call({"op": op, "id": job_id, "tube": target}, lambda: queue.move(job_id, target))
            else:
                self.call({"op": op, "id": job_id}, lambda: getattr(queue, op)(job_id))


def start(folder: str, seed: int, generation: int, plant: Callable[[], object] | None) -> tuple[int, int]:
    """Another worker: its process, and the pipe that it talks through."""
    pipe, other = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(pipe)
            if plant is not None:
                plant()
            Worker(folder, other, seed, generation).work()
        except BaseException as error:  # to be seen by who runs this
            print(f"worker {generation}: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    os.close(other)
    return pid, pipe


# -- who kills, and knows --------------------------------------------------------------------------------------------


class Ledger:
    """What was told, and what must be found because of it."""

    def __init__(self, counts: Counter[str]) -> None:
        self.counts = counts
        self.jobs: Jobs = {}
        self.buried: list[int] = []
        self.total_jobs = 0
        self.highest = 0
        self.under_way: dict[str, Any] | None = None
        self.found: Jobs = {}
        self.looked = False

    def hear(self, message: dict[str, Any]) -> None:
        if "found" in message:
            job_id = message.pop("found")
            assert job_id not in self.found, f"job {job_id} is there twice"
            self.found[job_id] = message
        elif "buried" in message:
            order = [job_id for job_id in self.buried if job_id in message["buried"]]
            known = [job_id for job_id in message["buried"] if job_id in order]
            assert known == order, f"the buried are {known}, and were {order}"
        elif "total_jobs" in message:
            self.compare(message)
        elif "op" in message:
            self.under_way = message
        else:
            assert self.under_way is not None
            self.apply(self.under_way, message["returned"])
            self.under_way = None
            self.counts["calls"] += 1

    def apply(self, op: dict[str, Any], result: Any) -> None:
        kind = op["op"]
        if kind == "put":
            ids = result if isinstance(result, list) else [result]
            for job_id, token in zip(ids, op["tokens"], strict=True):
                assert job_id > self.highest, f"id {job_id} was used before, or {self.highest}"
                self.highest = job_id
                self.total_jobs += 1
                state = "delayed" if op["delay"] else "ready"
                facts = {"token": token, "state": state, **{name: op[name] for name in ("tube", "priority", "ttr")}}
                self.jobs[job_id] = facts | {"timeouts": 0, "releases": 0, "buries": 0, "kicks": 0}
            return
        job = self.jobs[op["id"]]
        was_buried = job["state"] == "buried" and kind != "move"
        if kind == "delete":
            del self.jobs[op["id"]]
        elif kind == "release":
            state = "delayed" if op["delay"] else "ready"
            job |= {"state": state, "priority": op["priority"], "releases": job["releases"] + 1}
        elif kind == "bury":
            job |= {"state": "buried", "priority": op["priority"], "buries": job["buries"] + 1}
        elif kind == "kick_job":
            job |= {"state": "ready", "kicks": job["kicks"] + 1}
        elif kind == "move":
            job["tube"] = op["tube"]  # in its place among the buried, if it is one
        if was_buried:
            self.buried.remove(op["id"])
        if kind == "bury":
            self.buried.append(op["id"])

    def compare(self, message: dict[str, Any]) -> None:
        """What the next one has found, with what was left, and with what was under way."""
        before, total = {job_id: dict(job) for job_id, job in self.jobs.items()}, self.total_jobs
        buried = list(self.buried)
        new = sorted(self.found.keys() - before.keys())
        assert not new or (self.under_way is not None and self.under_way["op"] == "put"), f"jobs from nowhere: {new}"
        if self.under_way is not None:
            if self.under_way["op"] == "put":
                if new:
                    self.apply(self.under_way, new)  # all of them: the lengths are compared
                    self.counts["calls under way that have happened"] += 1
            else:
                self.apply(self.under_way, None)
        for job_id in before.keys() | self.jobs.keys():
            self.compare_one(job_id, self.found.get(job_id), before.get(job_id), self.jobs.get(job_id))
        assert total <= message["total_jobs"] <= self.total_jobs
        assert message["last_id"] >= self.highest
        self.jobs, self.total_jobs, self.found = self.found, message["total_jobs"], {}
        buried += [job_id for job_id in self.buried if job_id not in buried]
        self.buried = [job_id for job_id in buried if self.jobs.get(job_id, {}).get("state") == "buried"]
        self.under_way = None
        self.looked = True
        self.counts["jobs compared"] += len(self.jobs)
        self.counts["segments"] += message["segments"]

    def compare_one(
        self, job_id: int, found: dict[str, Any] | None, before: dict[str, Any] | None, after: dict[str, Any] | None
    ) -> None:
        if found is None:
            assert before is None or after is None, f"job {job_id} is lost; it was {before}"
            return
        wanted = [dict(each) for each in (before, after) if each is not None]
        for each in wanted:
            if each["ttr"] < LONG and found["timeouts"] >= each["timeouts"]:
                each["timeouts"] = found["timeouts"]
        assert found in wanted, f"job {job_id} is {found}, not one of {wanted}"


def live(ledger: Ledger, pid: int, pipe: int, seconds: float) -> None:
    """Hear a worker until it has looked and lived for so long; then kill it, and hear the rest."""
    ledger.looked = False
    deadline, rest, killed = time.monotonic() + 20.0, b"", False
    while True:
        wait = None if killed else max(0.0, deadline - time.monotonic())
        if not select.select([pipe], [], [], wait)[0]:
            os.kill(pid, signal.SIGKILL)
            killed = True
            continue
        data = os.read(pipe, 1 << 16)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            was, message = ledger.looked, json.loads(line)
            ledger.hear(message)
            if ledger.looked and not was:
                deadline = time.monotonic() + seconds
    os.close(pipe)
    status = os.waitpid(pid, 0)[1]
    assert killed, "it had ended by itself"
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def main(what: str, seed: int, limit: int | None, seconds: float | None, plant: Any) -> Counter[str]:
    choose, counts = random.Random(seed), Counter[str]()
    folder = tempfile.mkdtemp()
    ledger = Ledger(counts)
    for generation in rounds(limit, seconds, lambda: counts["calls"] > CALLS_PER_KILL * (limit or 0)):
        pid, pipe = start(folder, seed, generation, plant)
        try:
            live(ledger, pid, pipe, choose.random() ** 2 * 0.08)
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            raise
        counts["kills"] += 1
    shutil.rmtree(folder)
    return counts


if __name__ == "__main__":
    as_program(main)
