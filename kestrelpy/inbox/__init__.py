"""The inbox: how a process that does not have a queue open puts items into the queue, exactly once.

``put_many`` does it in one call. It is made of these: each task writes a sealed part file (``PartWriter``). One call
publishes all parts of a job at once (``publish``). The owner of the queue ingests the published batch, as a whole and
once; if nobody has the queue open, ``take_in`` does. A batch may have an ``app_id`` and a rising ``version`` (Delta
Lake's ``txnAppId`` and ``txnVersion``). Then a batch that is published a second time, after any kill, is dropped. The
promises are in docs/guarantees.md, the files in docs/format.md.

    put_many(folder, "jobs", [b"one", b"two"])

    with PartWriter(folder, "jobs") as writer:
        writer.add([b"one", b"two"])
        part = writer.seal()
    publish(folder, "jobs", [part], app_id="nightly", version=7)
"""

from __future__ import annotations

from kestrelpy.inbox.format import Part
from kestrelpy.inbox.parts import PartWriter
from kestrelpy.inbox.publishing import discard, last_version, pending, pending_queues, publish, take_in
from kestrelpy.inbox.putting import put_many

__all__ = [
    "Part",
    "PartWriter",
    "discard",
    "last_version",
    "pending",
    "pending_queues",
    "publish",
    "put_many",
    "take_in",
]
