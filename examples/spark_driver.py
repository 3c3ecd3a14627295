"""A Spark driver that is fed by the service it runs in: micro-batches out of a durable queue.

    python spark_driver.py

Threads of the driver put clicks, and ``DriverBuffer`` calls ``count_clicks`` with a DataFrame of those that came. If
it returns, they are committed. If it raises, or the process dies, the same batch comes again under the same number; so
the result is stored by that number, and each click counts once. It needs ``kestrelpy[spark]`` and Java 17. It prints:

    batch ...: ... clicks
    ...
    500 clicks of this run, each once: True
"""

import glob
import json
import threading
import time
import uuid

from pyspark.sql import DataFrame

from kestrelpy import JournaledQueue
from kestrelpy.codecs import JSON
from kestrelpy.spark import DriverBuffer, local_session

FOLDER, RUN, THREADS, CLICKS = "spark-data", uuid.uuid4().hex, 5, 100
OPTIONS = {"spark.log.level": "ERROR", "spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}


def count_clicks(clicks: DataFrame, batch_id: int) -> None:
    """Called on the buffer's own thread. A batch that comes again overwrites its file."""
    rows = clicks.groupBy("page", "run").count().collect()
    with open(f"batch-{batch_id}.json", "w") as file:
        json.dump([row.asDict() for row in rows], file)
    print(f"batch {batch_id}: {sum(row['count'] for row in rows)} clicks", flush=True)


def serve(queue: JournaledQueue[bytes], number: int) -> None:
    """A thread of the service."""
    for click in range(CLICKS):
        queue.put(json.dumps({"run": RUN, "page": f"/page/{click % 3}", "user": number}).encode())


def counted() -> int:
    """What the files of all batches have of this run."""
    total = 0
    for path in glob.glob("batch-*.json"):
        with open(path) as file:
            total += sum(row["count"] for row in json.load(file) if row["run"] == RUN)
    return total


def main() -> None:
    spark = local_session(master="local[2]", **OPTIONS)
    schema = "run string, page string, user int"
    with (
        JournaledQueue(FOLDER, "clicks") as queue,
        DriverBuffer(queue, spark, count_clicks, schema=schema, codec=JSON, max_wait=0.2),
    ):
        threads = [threading.Thread(target=serve, args=(queue, number)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        while queue.stats().items:
            time.sleep(0.05)
    spark.stop()
    print(f"{counted()} clicks of this run, each once: {counted() == THREADS * CLICKS}")


if __name__ == "__main__":
    main()
