"""Blocking queues in memory: a fast one and a plain one, which behave the same.

Rules:
1. First come, first served: an item goes to the consumer that has waited longest, and room to the producer that has
   waited longest. A get or a put that comes later does not pass them.
2. An item is in the queue, or with one consumer, or on its way between the two on the stack of one thread, which puts
   it back if it fails. ``for x in map(f, repeat(a)): break`` is ``x = f(a)``, but no interrupt can strike in it: an
   interrupt there would find the item taken and ``x`` not set.
3. While the lock is held, no waiter is completed, no callback runs and no item is freed. The predicate of ``get_if``
   runs under the lock, as part of the take.
4. A thread that has held the lock matches items and waiters after releasing it (``_match``): other threads may have
   relied on it to do so.

Atomic operations relied upon, in CPython with the GIL and without: ``deque.append``, ``popleft``, ``pop``, ``len`` and
truth of a container, ``list.pop``, the load and the store of an attribute, one step of an iterator of rule 2.
"""

from __future__ import annotations

from kestrelpy.memory._concurrent import ConcurrentBlockingQueue
from kestrelpy.memory._protocol import BlockingQueue
from kestrelpy.memory._simple import SimpleBlockingQueue

__all__ = ["BlockingQueue", "ConcurrentBlockingQueue", "SimpleBlockingQueue"]
