"""The write-ahead log of a queue: its bytes and its files. No thread, no clock and no reader is in here.

``format`` and ``packing`` are bytes; ``segment`` and ``checkpoint`` one file each; ``journal`` has the segments of a
writer, ``view`` those of a reader; ``recovery`` opens them; ``queue_files`` has all files of one queue.
"""
