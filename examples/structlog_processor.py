"""structlog into a durable queue: a processor of five lines.

    python structlog_processor.py

The processor stands at the end of the chain. It stores each event as JSON, and another part of the program, or another
process, takes the events from the queue. An event for which the call has returned survives kill -9. It needs
structlog. It prints:

    sold {'count': 3, 'what': 'apples', 'shop': 'Bern'}
    sold {'count': 1, 'what': 'pears', 'shop': 'Bern'}
    refund {'what': 'apples', 'reason': 'ValueError'}
"""

import json
from collections.abc import MutableMapping
from typing import Any, NoReturn

import structlog

from kestrelpy import JournaledQueue


class ToQueue:
    def __init__(self, queue: JournaledQueue[bytes]) -> None:
        self.queue = queue

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> NoReturn:
        self.queue.put(json.dumps(event, default=repr).encode())
        raise structlog.DropEvent  # it is stored, and printed nowhere


def main() -> None:
    with JournaledQueue("structlog-data", "events") as queue:
        structlog.configure(
            processors=[
                structlog.contextvars.merge_contextvars,
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso"),
                ToQueue(queue),
            ]
        )
        log = structlog.get_logger()
        with structlog.contextvars.bound_contextvars(shop="Bern"):
            log.info("sold", count=3, what="apples")
            log.info("sold", count=1, what="pears")
        log.warning("refund", what="apples", reason=ValueError.__name__)
        while queue.reader().items:
            with queue.get() as item:
                event = json.loads(item.data)
                del event["timestamp"], event["level"]
                print(event.pop("event"), event)


if __name__ == "__main__":
    main()
