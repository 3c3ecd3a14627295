"""The shop and the mailers of the demo: their tables, their outbox, and the two kinds of process.

    python -m kestrelpy.demo.outbox.shop URL FOLDER ORDERS sell     puts orders, each with two jobs, and rolls some back
    python -m kestrelpy.demo.outbox.shop URL FOLDER ORDERS mail     runs the jobs until SIGTERM

A mail "is sent" when its line is in the ledger, a file outside of the database.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from sqlalchemy import Column, Engine, Integer, MetaData, Table, Text, create_engine, func, select

from kestrelpy.outbox import Outbox

__all__ = ["BOOKINGS", "ORDERS", "engine_of", "outbox_of", "plain"]

METADATA = MetaData()
ORDERS = Table("demo_orders", METADATA, Column("id", Integer, primary_key=True), Column("email", Text, nullable=False))
BOOKINGS = Table(
    "demo_bookings", METADATA, Column("id", Integer, primary_key=True), Column("order_id", Integer, nullable=False)
)
"""What the transactional handler writes. Nothing keeps an order from being booked twice, but the outbox."""
ROLLED_BACK = 0.1
"""The share of the orders whose transaction is rolled back."""


def engine_of(url: str) -> Engine:
    """An engine; on SQLite with a write-ahead log, so that readers and the writer do not wait for each other."""
    engine = create_engine(url)
    if engine.dialect.name == "sqlite":
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode = wal")
    return engine


def outbox_of(engine: Engine) -> Outbox:
    """The outbox, with a lease that is short enough for a demo."""
    return Outbox(engine, table="demo_jobs", lease=2.0)


def sell(engine: Engine, outbox: Outbox, orders: int) -> None:
    """Put orders until there are so many: each with a mail and a booking, in one transaction."""
    outbox.queue("mail")
    outbox.queue("book")
    with engine.connect() as connection:
        last = connection.scalar(select(func.coalesce(func.max(ORDERS.c.id), 0))) or 0
    while last < orders:
        last += 1
        with engine.connect() as connection, connection.begin() as transaction:
            email = f"customer-{last}@example.org"
            connection.execute(ORDERS.insert().values(id=last, email=email))
            outbox.put(connection, "mail", {"order": last, "to": email}, key=f"order-{last}")
            outbox.put(connection, "book", {"order": last}, key=f"order-{last}")
            if random.random() < ROLLED_BACK and last < orders:
                transaction.rollback()  # the customer has changed his mind


def mail(outbox: Outbox, ledger: Path) -> None:
    """Run the jobs until a signal comes."""
    file = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    @outbox.consumer("mail")
    def send(payload: dict[str, object]) -> None:
        os.write(file, f"{payload['order']}\n".encode("ascii"))

    @outbox.consumer("book", transactional=True)
    def book(payload: dict[str, int], connection: object) -> None:
        connection.execute(BOOKINGS.insert().values(order_id=payload["order"]))  # type: ignore[attr-defined]

    outbox.run(threads=2)


def plain(url: str) -> str:
    """The URL without its password, to be shown."""
    from sqlalchemy import make_url

    return make_url(url).render_as_string()


def main(arguments: list[str]) -> None:
    """One process of the demo."""
    url, folder, orders, role = arguments
    engine = engine_of(url)
    with outbox_of(engine) as outbox:
        if role == "sell":
            sell(engine, outbox, int(orders))
        else:
            mail(outbox, Path(folder) / "mails.ledger")
    engine.dispose()


if __name__ == "__main__":
    main(sys.argv[1:])
