"""The query of the demo: Spark reads both queues from the store, when all machines are gone.

    python -m kestrelpy.demo.ship.query FOLDER STORE

The driver plans, and executors in processes of their own read. No machine's folder is there any more. What they find is
noted as what a consumer gets: ``got ID LINE``, in ``QUEUE.spark``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kestrelpy.demo.ship.ledger import QUEUES, OutsideLedger
from kestrelpy.spark import local_session


def main(arguments: list[str]) -> int:
    """Read both queues. Returns the exit status."""
    folder, store = arguments
    quiet = {"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": False}
    spark = local_session(master="local-cluster[2,1,1024]", **quiet)
    try:
        for queue in QUEUES:
            rows = spark.read.format("kestrel").option("queue", queue).load(store).select("id", "data").orderBy("id")
            ledger = OutsideLedger(Path(folder), f"{queue}.spark")
            ledger.got((int(row.id), bytes(row.data)) for row in rows.collect())
            ledger.close()
    finally:
        spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
