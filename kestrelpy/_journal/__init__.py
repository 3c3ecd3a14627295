"""The write-ahead log of a queue: its bytes and its files. Nothing here has a thread, a clock or a reader.

``format``, ``packing`` and ``bodies`` encode and decode bytes. ``segment`` and ``checkpoint`` each handle one file.
``journal`` has the segments of a writer, ``view`` those of a reader. ``recovery`` opens them. ``queue_files`` has all
files of one queue.
"""
