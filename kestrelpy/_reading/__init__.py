"""One reader, from its progress up to the calls of users; and all readers of a queue.

A reader reads from a ``source``: ``local_source`` in the process that writes the queue, ``detached_source`` in another
process.
"""
