"""What queues keep when processes are killed and the power fails: ``python -m bench.crash``.

One loop for all of them, behind the same few calls (``peers.py``). A process of its own opens the queue, puts items
and takes others out, in an order drawn from a seed, and says over a pipe what the library has told it: that a put has
returned, that an item was handed out, that it is done for good. At a moment drawn from the seed it is killed with
SIGKILL; or the power of the file system that the queue is on is cut, which is then a real ext4 of its own on a loop
device, shut down without writing its log, unmounted and mounted again. Then a fresh process opens the queue with the
same library, reads everything, closes it, and the next round begins in the same folder; in a new one if the queue
could not be opened or read. Items carry their number and a checksum.

Half of the power cuts are preceded by a ``sync`` of the file system somewhere in the round, as the kernel does one when
it likes: then part of what nobody waited for is on disk.
"""
