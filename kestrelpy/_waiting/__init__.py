"""Waiting: who waits, for what.

``line`` has the line of a queue or a reader, and what every class with a line does. ``waiters`` has the waiters in it:
threads, futures and tasks of asyncio. ``put_future`` is the future of a put. ``deferred`` makes calls on a thread of
its own that a finaliser must not make.
"""
