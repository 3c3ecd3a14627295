"""The inbox: how a process that does not have a queue open puts items into it, exactly once.

Each task writes a sealed part file (``PartWriter``); one call publishes all parts of a job at once (``publish``); the
queue's owner takes the published batch in, as a whole and once, or ``take_in`` does if nobody has the queue open. A
batch carries an ``app_id`` and a rising ``version`` (Delta Lake's ``txnAppId`` and ``txnVersion``): what is published
again, after whatever kill, is dropped. docs/guarantees.md has what is promised, docs/format.md the files.

    with PartWriter(folder, "jobs") as writer:
        writer.add([b"one", b"two"])
        part = writer.seal()
    publish(folder, "jobs", [part], app_id="nightly", version=7)
"""

from __future__ import annotations

from kestrelpy.inbox.format import Part
from kestrelpy.inbox.parts import PartWriter
from kestrelpy.inbox.publishing import discard, last_version, pending, publish, take_in

__all__ = ["Part", "PartWriter", "discard", "last_version", "pending", "publish", "take_in"]
