"""The tables of an outbox, as SQLAlchemy's ``MetaData``, and how they are created.

    {table}           a row for each job; people query it, so its columns are part of the interface
    {table}_queues    a row for each queue that was ever paused
    {table}_relays    a row for each relay: who works for it and until when, and the batch that it is moving
    {table}_version   one row: the version of these tables

Rules:
1. Claims find jobs by status and due time, never by position: ids are given out before their transactions commit, so a
   cursor "above the last id seen" would skip the ones that commit late.
2. Every index of the jobs is partial, by status. A row is in the index of its status alone, so a million done rows cost
   a claim nothing. Statements name the status as a literal: with a parameter the planner could not use the index.
3. ``{table}_lane_runs`` allows one running job a lane. Two claims that overlap do not see each other's rows; the unique
   index is what both touch. A batch of a relay has many jobs of a lane, in their order; what keeps two relays apart is
   their row in ``{table}_relays``.
4. ``relay_batch`` is set as long as a job is in a batch of a relay, and not afterwards, so its index stays small. The
   job is running then, its ``worker`` is the name of the relay, and it has no token and no lease of its own.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Identity, Index, Integer, LargeBinary, MetaData, Table, Text, text

__all__ = ["VERSION", "OutboxTables"]

VERSION = 1
"""The version of the tables that this library writes."""

BIG = BigInteger().with_variant(Integer, "sqlite")
"""64 bits: SQLite has them in every ``INTEGER``, and only an ``INTEGER`` can be its row id."""


class OutboxTables:
    """The tables of one outbox. ``name``: the table of the jobs; ``schema``: where it is, or ``None``."""

    def __init__(self, name: str, schema: str | None) -> None:
        self.name = name
        self.schema = schema
        self.metadata = MetaData(schema=schema, info={"version": VERSION})
        self.jobs = self._jobs()
        self.queues = Table(
            f"{name}_queues",
            self.metadata,
            Column("queue", Text, primary_key=True),
            Column("paused", Boolean, nullable=False),
        )
        self.relays = Table(
            f"{name}_relays",
            self.metadata,
            Column("name", Text, primary_key=True),
            Column("queue", Text, nullable=False),
            Column("app_id", Text, nullable=False),  # under which it publishes: the name and a random part
            Column("owner", Text),
            Column("until_ms", BIG, nullable=False),
            Column("batch", BIG, nullable=False),  # the last number that was given to a batch
            Column("part", Text),  # the file that its items are written to
            Column("sealed", Text),  # what the file holds, as JSON, once nothing but this file may be published
        )
        self.version = Table(f"{name}_version", self.metadata, Column("version", Integer, nullable=False))

    def become_those_of_sqlite(self) -> None:
        """SQLite has no IDENTITY, and Alembic would find at each comparison that it is missing."""
        self.jobs.c.id.server_default = None
        self.jobs.c.id.identity = None

    def _jobs(self) -> Table:
        table = Table(
            self.name,
            self.metadata,
            Column("id", BIG, Identity(), primary_key=True),
            Column("queue", Text, nullable=False),
            Column("key", Text),
            Column("job_group", Text),
            Column("lane", Text),
            Column("status", Text, nullable=False),
            Column("priority", Integer, nullable=False),
            Column("payload", Text),
            Column("payload_binary", LargeBinary),  # instead of ``payload``, where the codec gives bytes
            Column("payload_bytes", Integer, nullable=False),
            Column("context", Text),
            Column("depends_on", BIG),
            Column("tries", Integer, nullable=False, server_default="0"),
            Column("added_ms", BIG, nullable=False),
            Column("due_ms", BIG, nullable=False),
            Column("started_ms", BIG),
            Column("finished_ms", BIG),
            Column("first_error_ms", BIG),
            Column("error", Text),
            Column("worker", Text),
            Column("token", BIG),
            Column("was_due_ms", BIG),  # of a running job: ``due_ms`` before the claim, which is its lease now
            Column("held", Boolean, nullable=False, server_default=text("false")),  # ready, behind others of its lane
            Column("relay_batch", BIG),
            sqlite_autoincrement=True,
        )
        columns = table.c
        self._index("key", columns.queue, columns.key, where="key IS NOT NULL", unique=True)
        self._index(
            "ready", columns.queue, columns.priority, columns.due_ms, columns.id, where="status = 'ready' AND NOT held"
        )
        self._index("error", columns.queue, columns.due_ms, columns.id, where="status = 'error'")
        self._index("failed", columns.first_error_ms, where="status IN ('error', 'dead')")
        self._index("running", columns.due_ms, where="status = 'running' AND relay_batch IS NULL")
        self._index("waiting", columns.depends_on, where="status = 'waiting'")
        self._index("finished", columns.queue, columns.finished_ms, where="status IN ('done', 'dead', 'cancelled')")
        self._index("group", columns.queue, columns.job_group, where="job_group IS NOT NULL")
        self._index(
            "lane",
            columns.queue,
            columns.lane,
            columns.id,
            where="lane IS NOT NULL AND status IN ('ready', 'running', 'error')",
        )
        self._index(
            "lane_runs",
            columns.queue,
            columns.lane,
            where="lane IS NOT NULL AND status = 'running' AND relay_batch IS NULL",
            unique=True,
        )
        self._index("held", columns.queue, columns.lane, where="held AND status = 'ready' AND lane IS NOT NULL")
        self._index("relay", columns.relay_batch, where="relay_batch IS NOT NULL")
        return table

    def _index(self, purpose: str, *columns: Column[object], where: str, unique: bool = False) -> None:
        condition = text(where)
        name = f"{self.name}_{purpose}"
        Index(name, *columns, unique=unique, postgresql_where=condition, sqlite_where=condition)
