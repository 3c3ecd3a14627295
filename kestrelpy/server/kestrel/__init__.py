"""The protocols of kestrel (memcache, text, thrift) on journaled queues.

On one thread, that of an event loop: nothing here has a lock. From the clients down: a protocol (``memcache``,
``text``, ``thrift``) does a command with the ``Queues``; a ``ServedQueue`` is one queue as clients see it; a
``SharedJournal`` is what a queue and its fan-outs read together.
"""
