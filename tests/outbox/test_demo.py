"""``make demo-outbox``, on both databases, small; and its proof, which must fail where something is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from kestrelpy.demo.outbox.__main__ import main, prove
from kestrelpy.demo.outbox.shop import BOOKINGS, METADATA, ORDERS, engine_of, outbox_of, plain


def test_the_demo_proves_its_point(database_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--bind", database_url, "--orders", "60", "--kills", "1", "--seed", "1"]) == 0
    assert "proven" in capsys.readouterr().out


@pytest.fixture
def sold(tmp_path: Path) -> Iterator[Engine]:
    """Orders 1 and 3, of which each is booked once."""
    engine = engine_of(f"sqlite:///{tmp_path}/shop.db")
    METADATA.create_all(engine)
    with engine.begin() as connection:
        for number in (1, 3):
            connection.execute(ORDERS.insert().values(id=number, email="a"))
            connection.execute(BOOKINGS.insert().values(order_id=number))
    yield engine
    engine.dispose()


@pytest.mark.parametrize(
    ("mails", "booked_again", "complaint"),
    [
        ("1 3 3", [], ""),
        ("1", [], "1 orders without a mail"),
        ("1 2 3", [], "1 mails of orders that were rolled back"),
        ("1 3", [3], "1 orders booked more than once"),
        ("1 3", [2], "1 bookings of orders that were rolled back"),
    ],
)
def test_the_proof_fails_where_something_is_wrong(
    sold: Engine, tmp_path: Path, mails: str, booked_again: list[int], complaint: str
) -> None:
    with sold.begin() as connection:
        for number in booked_again:
            connection.execute(BOOKINGS.insert().values(order_id=number))
    ledger = tmp_path / "mails.ledger"
    ledger.write_text("\n".join(mails.split()), encoding="ascii")
    with outbox_of(sold) as outbox:
        outbox.create_tables()
        complaints, _ = prove(sold, outbox, ledger, 0)
    assert complaints == ([complaint] if complaint else [])


def test_a_password_is_not_shown() -> None:
    assert "secret" not in plain("postgresql+psycopg://me:secret@host/db")
