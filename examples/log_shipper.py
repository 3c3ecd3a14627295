"""A log shipper: services log into a durable queue, and one process hands the records on.

    python log_shipper.py

Two services, each a process of its own, log a hundred lines. One of them is killed by SIGKILL in the middle. A third
process, the shipper, owns the queue and writes all records into shipped.log, where your Elasticsearch, Loki or HTTP
handler would be. No line that a service has logged is missing, those of the killed one included. It prints:

    shop: logged 100 lines
    till: killed after 50 lines
    shipped 150 records of this run

The shipper may be killed, too: start the program again in the same folder. Records that were handled in its last
second may then be in shipped.log twice.
"""

import logging
import multiprocessing
import os
import signal
import uuid

from kestrelpy import JournaledQueue
from kestrelpy.logging import DurableHandler, DurableListener, collect

FOLDER, QUEUE, SHIPPED = "log-data", "logs", "shipped.log"


def service(name: str, run: str, dies_after: int | None) -> None:
    """A program that logs. It names the queue; it does not own it."""
    logging.getLogger().addHandler(DurableHandler(QUEUE, directory=FOLDER))  # basicConfig would give it a formatter
    logging.getLogger().setLevel(logging.INFO)
    for number in range(100):
        if number == dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        logging.getLogger(name).info("%s line %d", run, number)


def main() -> None:
    run = uuid.uuid4().hex
    target = logging.FileHandler(SHIPPED)
    target.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    with JournaledQueue(FOLDER, QUEUE) as queue, DurableListener(queue, target):
        spawn = multiprocessing.get_context("spawn")
        shop = spawn.Process(target=service, args=("shop", run, None))
        till = spawn.Process(target=service, args=("till", run, 50))
        for process in (shop, till):
            process.start()
        for process in (shop, till):
            process.join()
        print("shop: logged 100 lines" if shop.exitcode == 0 else f"shop: status {shop.exitcode}", flush=True)
        print("till: killed after 50 lines" if till.exitcode == -signal.SIGKILL else "till: not killed", flush=True)
        collect(FOLDER, QUEUE)  # the lines of the killed one, at once; by itself the listener looks every ten seconds
        queue.take_in()
    target.close()
    with open(SHIPPED) as file:
        print("shipped", sum(run in line for line in file), "records of this run")


if __name__ == "__main__":
    main()
