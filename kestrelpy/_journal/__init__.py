"""The write-ahead log of a queue: its bytes and its files. Nothing here has a thread, a clock or a reader.

``format``, ``packing`` and ``bodies`` encode and decode bytes. ``segment`` and ``checkpoint`` each handle one file.
``journal`` appends for a writer; ``view`` reads segments as one sequence, ``follow`` those that another process writes.
``catalog`` knows which segments there are. ``recovery`` opens a journal, ``archive`` moves consumed segments away.
``file_names`` says which file is whose, and ``queue_files`` has the locks and files of one queue; ``purpose`` tells a
work queue from a queue of items, and ``item_limit`` tells publishers how large an item may be.
"""
