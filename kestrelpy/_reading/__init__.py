"""One reader, from its progress up to the calls of users; and all readers of a queue.

``progress`` knows which items are done. ``window`` keeps the newest items for all readers. ``backlog`` has the items
of one reader that are not done, ``dispatch`` gives them to consumers, ``hooks`` calls the user's hooks,
``checkpointer`` saves the reader's state, and ``reader`` is the class that users call.

A reader reads from a ``source``: ``local_source`` in the process that writes the queue, ``detached_source`` in another
process (with ``open_reader``). ``registry`` has all readers of a queue, and ``limits`` those that a put must respect.
"""
