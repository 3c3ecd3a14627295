"""Blocking queues in memory: one that is fast and one that is plain, with one behaviour.

Rules:
1. First come, first served: an item goes to the consumer who has waited longest, room to the producer who has. A get
   or a put that comes later does not pass them.
2. An item is in the queue, or with one consumer, or on its way between the two on the stack of one thread, which puts
   it back if it fails. ``for x in map(f, repeat(a)): break`` is ``x = f(a)`` with no place in it for an interrupt,
   which would find the item taken and ``x`` not set.
3. Nobody is completed, no callback runs and no item is freed while the lock is held. The predicate of ``get_if`` is run
   under it, as part of the take.
4. Whoever has held the lock matches items and waiters after releasing it (``_match``): others may have counted on that.

Atomic operations relied upon, in CPython with the GIL and without: ``deque.append``, ``popleft``, ``pop``, ``len`` and
truth of a container, ``list.pop``, the load and the store of an attribute, one step of an iterator of rule 2.
"""

from __future__ import annotations

from kestrelpy.memory._concurrent import ConcurrentBlockingQueue
from kestrelpy.memory._protocol import BlockingQueue
from kestrelpy.memory._simple import SimpleBlockingQueue

__all__ = ["BlockingQueue", "ConcurrentBlockingQueue", "SimpleBlockingQueue"]
