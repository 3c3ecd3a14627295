"""A queue that outlives its machine: shipped to a folder on another disk, and restored from there.

    python ship_and_restore.py

With ``acks="shipped"`` a put returns when its item is in the store. Then the machine is lost, here the folder of the
queue. ``restore`` makes the queue again elsewhere, with the reader where it was. For an object store the URL is
s3://bucket/prefix, and ``kestrelpy[ship]`` is needed. It prints:

    put 10 items, handled 4
    the machine is lost
    restored into elsewhere-...
    what was not handled is there: ['item 5', 'item 6', 'item 7', 'item 8', 'item 9', 'item 10']
"""

import os
import shutil
import uuid

from kestrelpy import JournaledQueue
from kestrelpy.ship import Ship, restore

RUN = uuid.uuid4().hex  # each run has a store and folders of its own
STORE = f"file://{os.path.abspath('store')}/{RUN}"  # a folder of another disk, or of another host over NFS


def main() -> None:
    with JournaledQueue(f"machine-{RUN}", "jobs", ship=Ship(STORE, acks="shipped")) as queue:
        queue.put_many([b"item %d" % number for number in range(1, 11)])  # in the store now
        queue.commit_many(queue.get_many(4))
        print("put 10 items, handled 4")  # the reader's place is shipped within a second or two, and at the end

    shutil.rmtree(f"machine-{RUN}")
    print("the machine is lost")

    restore(STORE, "jobs", f"elsewhere-{RUN}")
    print(f"restored into elsewhere-{RUN}")
    with JournaledQueue(f"elsewhere-{RUN}", "jobs", ship=STORE) as queue:  # it goes on, and is shipped from here
        rest = queue.get_many(10)
        print("what was not handled is there:", [item.data.decode() for item in rest])
        queue.commit_many(rest)


if __name__ == "__main__":
    main()
