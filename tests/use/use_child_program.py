"""A process of ``use_children``: does what it is told, one line of JSON after the other, on a real folder."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from typing import Any

from kestrelpy import ForkedQueue, Item, JournaledQueue, QueueEmpty, Reader, open_reader
from kestrelpy._disk.real import RealDisk
from kestrelpy.cli import main
from kestrelpy.inbox import PartWriter, publish
from kestrelpy.ship import Ship
from kestrelpy.work import Job, Session, WorkQueue


class Child:
    """What the process has open."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.queue: JournaledQueue | None = None
        self.reader: Reader | None = None
        self.held: dict[int, Item] = {}
        self.work: WorkQueue | None = None
        self.session: Session | None = None
        self.jobs: dict[int, Job] = {}
        self.lock: Any = None

    def open(self, acks: Any = None) -> None:
        """``acks``: of the shipping; ``None``: it is not shipped."""
        options: dict[str, Any] = {"segment_bytes": 8192, "sync": 0.05, "inbox_interval": 0.05}
        if acks is not None:
            options["ship"] = Ship(f"file://{self.folder}/store", acks=acks, interval=0.02, manifest_interval=0.1)
        self.queue = JournaledQueue(self.folder, "a", **options)

    def flush(self) -> int:
        assert self.queue is not None
        assert self.queue.shipping is not None
        return self.queue.shipping.flush(10)

    def put(self, items: list[str]) -> list[int]:
        assert self.queue is not None
        if len(items) == 1:
            return [self.queue.put(items[0].encode())]
        return list(self.queue.put_many([item.encode() for item in items]))

    def close(self) -> None:
        if self.queue is not None:
            self.queue.close()
            self.queue = None
        if self.reader is not None:
            self.reader.close()
            self.reader = None
        if self.work is not None:
            self.work.close()
            self.work = self.session = None
        self.held.clear()
        self.jobs.clear()

    def read(self, name: str, here: bool) -> None:
        if here:
            assert self.queue is not None
            self.reader = self.queue.reader(name)
        else:
            self.reader = open_reader(self.folder, "a", name, poll_interval=0.01, create=True)

    def get(self, count: int) -> list[list[Any]]:
        assert self.reader is not None
        try:
            items = self.reader.get_many(count, timeout=0)
        except QueueEmpty:
            return []
        self.held.update({item.id: item for item in items})
        return [[item.id, item.data.decode()] for item in items]

    def commit(self, ids: list[int]) -> None:
        assert self.reader is not None
        self.reader.commit_many([self.held.pop(item_id) for item_id in ids])

    def save(self) -> None:
        assert self.reader is not None
        self.reader.checkpoint(durable=False)

    def publish(self, version: int, items: list[str]) -> bool:
        with PartWriter(self.folder, "a") as writer:
            for item in items:
                writer.add([item.encode()])
            return publish(self.folder, "a", [writer.seal()], app_id="child", version=version)

    def fork(self) -> str:
        """What a forked child is told that goes on with what its parent has open."""
        receive, send = os.pipe()
        pid = os.fork()
        if pid:
            os.close(send)
            said = os.read(receive, 1000).decode()
            os.close(receive)
            os.waitpid(pid, 0)
            return said
        said = "nothing"
        try:
            for call in self.calls():
                try:
                    call()
                except ForkedQueue:
                    continue
                except BaseException as error:
                    said = repr(error)
                    break
                said = "it was accepted"
                break
            os.write(send, said.encode())
        finally:
            os._exit(0)

    def calls(self) -> list[Any]:
        calls: list[Any] = []
        if self.queue is not None:
            calls += [lambda queue=self.queue: queue.put(b"of a forked child")]
            if (shipping := self.queue.shipping) is not None:
                calls += [lambda: shipping.flush(5), lambda: shipping.collect(5), lambda: shipping.hand_over(5)]
        if self.reader is not None:
            calls += [lambda reader=self.reader: reader.get(timeout=0)]
        if self.work is not None:
            calls += [lambda work=self.work: work.put(b"of a forked child")]
        return calls

    def hold(self) -> None:
        """The lock that guards the readers, for as long as nobody says ``let_go``."""
        self.lock = RealDisk(allow_network=True).directory(self.folder).lock("a.readers.lock")

    def let_go(self) -> None:
        self.lock.release()
        self.lock = None

    # -- jobs --------------------------------------------------------------------------------------------------------

    def work_open(self) -> None:
        self.work = WorkQueue(self.folder, "jobs", segment_bytes=8192, max_job_bytes=4000, sync=0.05)
        self.session = self.work.session(deadline_soon=False)

    def work_put(self, items: list[str]) -> list[int]:
        assert self.work is not None
        return list(self.work.put_many([item.encode() for item in items]))

    def work_get(self, count: int) -> list[list[Any]]:
        assert self.session is not None
        try:
            jobs = self.session.reserve_many(count, 0)
        except QueueEmpty:
            return []
        self.jobs.update({job.id: job for job in jobs})
        return [[job.id, job.body.decode()] for job in jobs]

    def work_delete(self, job_id: int) -> None:
        self.jobs.pop(job_id).delete()

    def work_wrong(self, way: str) -> object:
        """Whoever takes the work queue for a queue."""
        if way == "queue":
            return repr(JournaledQueue(self.folder, "jobs"))
        if way == "reader":
            return repr(open_reader(self.folder, "jobs", "x", create=True))
        if way == "writer":
            return repr(PartWriter(self.folder, "jobs"))
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = main([way, self.folder, "jobs"])
        return [code, said.getvalue()]


def serve(folder: str) -> None:
    child = Child(folder)
    out = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        what, arguments = json.loads(line)
        try:
            answer = {"value": getattr(child, what)(*arguments)}
        except Exception as error:
            answer = {"error": type(error).__name__, "said": str(error)}
        out.write(json.dumps(answer) + "\n")
        out.flush()


if __name__ == "__main__":
    serve(sys.argv[1])
