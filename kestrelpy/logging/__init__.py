"""Log records through a durable queue, in place of ``logging.handlers.QueueHandler`` and ``QueueListener``.

``DurableHandler`` stores records as JSON, and nothing of them is pickled. A record for which ``emit`` has returned
survives the death of its process, in the process that owns the queue and in any other one. ``DurableListener`` hands
records to handlers, and commits a record when they have it. docs/logging.md shows both.

    with JournaledQueue("queues", "logs") as queue:
        logging.getLogger().addHandler(DurableHandler(queue))
        with DurableListener(queue, logging.FileHandler("service.log")):
            serve()

In another process: ``DurableHandler("logs", "queues")``, also by ``logging.config.dictConfig``. ``RECORDS`` is the
codec of a queue whose values are log records. ``collect`` moves on what processes have left that were killed.
"""

from __future__ import annotations

from kestrelpy.logging.handler import DurableHandler
from kestrelpy.logging.listener import DurableListener
from kestrelpy.logging.records import RECORDS
from kestrelpy.logging.spool import collect

__all__ = ["RECORDS", "DurableHandler", "DurableListener", "collect"]
