"""An outbox on SQLite: a job is put in the transaction that changes your own tables.

    python outbox_on_sqlite.py

Both are committed, or neither is. A consumer runs the jobs, with retries. The second mail fails once;
the third order is rolled back, and so there is no mail. It needs ``kestrelpy[outbox]``. It prints:

    ordered ... for ann@example.org
    ordered ... for bob@example.org
    rolled back: the card of eve@example.org was refused
    ...
    mail to bob@example.org failed: the mail server is busy
    ...
    orders without a mail: 0, mails without an order: 0

A kill at any moment is no harm: start the program again in the same folder. Every order has its mail in mails.txt then,
and a mail may be there twice if the kill came between the mail and its mark.
"""

import logging
import time

from sqlalchemy import create_engine, text

from kestrelpy.outbox import Outbox

logging.disable(logging.ERROR)  # a failed job is logged with its traceback
engine = create_engine("sqlite:///orders.db")
outbox = Outbox(engine, lease=2.0)  # seconds until the jobs of a killed process are run; the default is 30
failures = 0


@outbox.consumer("mail", max_retries=20, backoff=0.2)
def send_mail(mail: dict[str, str]) -> None:
    """Returns: the job is done. Raises: it runs again, after the back-off."""
    global failures
    if mail["to"].startswith("bob") and not failures:
        failures += 1
        print(f"mail to {mail['to']} failed: the mail server is busy", flush=True)
        raise ConnectionError("the mail server is busy")
    with open("mails.txt", "a") as file:
        file.write(f"{mail['order']}\n")
    print("mail to", mail["to"], flush=True)


def order(email: str, card_is_good: bool = True) -> None:
    """The order and its mail in one transaction."""
    with engine.begin() as connection:
        number = connection.execute(text("INSERT INTO orders (email) VALUES (:e) RETURNING id"), {"e": email}).scalar()
        outbox.put(connection, "mail", {"to": email, "order": str(number)}, key=f"order-{number}")
        if not card_is_good:
            raise ValueError(f"the card of {email} was refused")
    print(f"ordered {number} for {email}", flush=True)


def main() -> None:
    outbox.create_tables()
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, email TEXT)"))
    order("ann@example.org")
    order("bob@example.org")
    try:
        order("eve@example.org", card_is_good=False)
    except ValueError as error:
        print("rolled back:", error, flush=True)
    with outbox.running(threads=1):
        while not all(count.status == "done" for count in outbox.stats()):
            time.sleep(0.02)
    with engine.connect() as connection:
        orders = {str(number) for number in connection.execute(text("SELECT id FROM orders")).scalars()}
    with open("mails.txt") as file:
        mails = set(file.read().split())
    print(f"orders without a mail: {len(orders - mails)}, mails without an order: {len(mails - orders)}")
    outbox.close()
    engine.dispose()


if __name__ == "__main__":
    main()
