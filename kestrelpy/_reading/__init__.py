"""One reader, from its progress up to what users call; and all readers of a queue.

``source`` is what a reader reads from: ``local_source`` in the process that writes the queue, ``detached_source`` in
another one.
"""
