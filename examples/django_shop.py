"""Django and the outbox: a view puts a job in the transaction of its models, and a process runs the jobs.

    python django_shop.py             # makes the tables, sends two requests, runs the jobs
    python django_shop.py run_jobs    # the consumers alone, until SIGTERM; in your project a management command

The view stores an order and its mail in one transaction. The second request fails after that: there is neither an
order nor a mail. ``transaction.on_commit`` would lose the mail if the process died between the commit and the call;
here the job is in the same database as the order. It needs Django and ``kestrelpy[outbox]``. It prints:

    201 for ann@example.org
    402 for bob@example.org
    mail to ann@example.org
    orders: ..., without a mail: 0
"""

import contextlib
import sys
import time

import django
from django.conf import settings

settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}},
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    ROOT_URLCONF=__name__,
    ALLOWED_HOSTS=["testserver"],
    LOGGING={"version": 1, "loggers": {"django.request": {"level": "ERROR"}}},
)
django.setup()

from django.db import OperationalError, connection, models, transaction
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path

from kestrelpy.outbox import Outbox

outbox = Outbox("sqlite:///shop.db")  # or "postgresql+psycopg://...": the database of DATABASES


class Order(models.Model):
    email = models.CharField(max_length=200)
    has_mail = models.BooleanField(default=False)

    class Meta:
        app_label = "shop"


@outbox.consumer("mail")
def send_mail(payload: dict[str, str]) -> None:
    """Returns: the job is done. Raises: it runs again later."""
    Order.objects.filter(pk=payload["order"]).update(has_mail=True)
    print("mail to", payload["to"], flush=True)
    connection.close()  # handlers run in threads of the outbox


def place_order(request: HttpRequest) -> HttpResponse:
    try:
        with transaction.atomic():
            order = Order.objects.create(email=request.POST["email"])
            job = {"to": order.email, "order": order.pk}
            outbox.put(connection.connection, "mail", job, key=f"order-{order.pk}")
            if request.POST["card"] == "bad":
                raise ValueError("the card was refused")
    except ValueError:
        return HttpResponse(status=402)
    return HttpResponse(status=201)


urlpatterns = [path("orders", place_order)]


def main() -> None:
    with contextlib.suppress(OperationalError), connection.schema_editor() as editor:
        editor.create_model(Order)  # your migrations do this; the second run finds the table
    outbox.create_tables()
    if sys.argv[1:] == ["run_jobs"]:
        outbox.run()
        return
    for email, card in (("ann@example.org", "good"), ("bob@example.org", "bad")):
        print(Client().post("/orders", {"email": email, "card": card}).status_code, "for", email, flush=True)
    with outbox.running():
        while any(count.status != "done" for count in outbox.stats()):
            time.sleep(0.01)
    print(f"orders: {Order.objects.count()}, without a mail: {Order.objects.filter(has_mail=False).count()}")
    connection.close()
    outbox.close()


if __name__ == "__main__":
    main()
