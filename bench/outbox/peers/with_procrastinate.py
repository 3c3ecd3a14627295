"""procrastinate, with psycopg and its own tables; jobs that are done stay, as they do by default."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import psycopg

from bench.outbox.peers.base import MARGIN_SECONDS, QUEUE, THREADS, Handler, Peer, payload

BATCH = 1000
TASK = "job"
FETCH = "SELECT id FROM procrastinate_fetch_job_v2(%s::varchar[], NULL)"
"""What its worker sends, but for the columns."""
LEFT = "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"
CROWD = """
    INSERT INTO procrastinate_jobs (queue_name, task_name, args, status, scheduled_at)
    SELECT '{queue}', 'job', '{args}', '{status}', {scheduled} FROM generate_series(1, {count})
"""
EVENTS = """
    INSERT INTO procrastinate_events (job_id, type) SELECT id, type::procrastinate_job_event_type
    FROM procrastinate_jobs, unnest(ARRAY['deferred', 'started', 'succeeded']) AS type WHERE status = 'succeeded'
"""


class Procrastinate(Peer):
    """Its handlers are coroutines, which is quicker for it than its threads."""

    name = "procrastinate"
    crowds = ("ready", "done", "error", "other queue")

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self._handler: Handler = lambda _text: None
        self._library = import_module("procrastinate")
        self._app = self._new_app(self._library.PsycopgConnector(conninfo=where))
        self._connection: psycopg.Connection[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None

    def _new_app(self, connector: Any) -> Any:
        async def run(text: str) -> None:
            self._handler(text)

        app = self._library.App(connector=connector)
        app.task(queue=QUEUE, name=TASK)(run)
        return app

    @property
    def connection(self) -> psycopg.Connection[Any]:
        """The one of who puts; a transaction begins with its first statement."""
        if self._connection is None:
            self._connection = psycopg.connect(self.where)
            self._putting = self._new_app(self._library.SyncPsycopgConnector(conninfo=self.where))
        return self._connection

    def defer(self, connection: psycopg.Connection[Any], numbers: Sequence[int]) -> None:
        """Put jobs in the transaction of this connection."""
        assert self.connection
        deferrer = self._putting.tasks[TASK].configure(connection=connection)
        deferrer.batch_defer(*({"text": payload(number)} for number in numbers))

    def create(self) -> None:
        self.connection.execute(self._library.schema.SchemaManager.get_schema().encode())
        self.connection.commit()

    def fill(self, numbers: Sequence[int]) -> None:
        for first in range(0, len(numbers), BATCH):
            self.defer(self.connection, numbers[first : first + BATCH])
        self.connection.commit()

    def put(self, number: int) -> None:
        self.defer(self.connection, [number])
        self.connection.commit()

    def left(self) -> int:
        (found,) = self.connection.execute(LEFT).fetchone() or (0,)
        self.connection.commit()
        return int(found)

    def start(self, handler: Handler) -> None:
        self._handler = handler
        begun = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work(begun)), daemon=True)
        self._thread.start()
        begun.wait()

    async def _work(self, begun: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        async with self._app.open_async():
            run = self._app.run_worker_async(queues=[QUEUE], concurrency=THREADS, install_signal_handlers=False)
            self._worker = asyncio.create_task(run)
            begun.set()
            await asyncio.gather(self._worker, return_exceptions=True)

    def stop(self) -> None:
        if self._loop is not None and self._worker is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._worker.cancel)
            self._thread.join()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def crowd(self, what: str, count: int) -> None:
        cursor = self.connection.cursor()
        cursor.execute("SET session_replication_role = replica")  # without triggers, of which each would notify
        self.connection.execute(
            CROWD.format(
                queue="other" if what == "other queue" else QUEUE,
                args=f'{{"text": "{payload(0)}"}}',
                status="succeeded" if what == "done" else "todo",
                scheduled=f"now() + interval '{MARGIN_SECONDS} seconds'" if what == "error" else "NULL",
                count=count,
            ).encode()
        )
        if what == "done":
            cursor.execute(EVENTS)
        cursor.execute("SET session_replication_role = DEFAULT")
        self.connection.commit()

    def claim(self) -> int:
        row = self.connection.execute(FETCH, [[QUEUE]]).fetchone()
        self.connection.commit()
        return int(row is not None and row[0] is not None)
