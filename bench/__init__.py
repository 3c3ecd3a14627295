"""The benchmarks: ``python -m bench``. Named workloads (``workloads.py`` lists them all), rivals behind adapters
(``rivals/``), among them the floor of a workload: the least code that does its work (``floor.py``).

How it measures. All contenders of a workload take part in every round, one after the other, each in a fresh folder, the
order turning by one each round, so that a noisy minute hits all of them. The first round is a warm-up and does not
count. Figures are the minimum, the median and the maximum over the rounds; ``times`` is a contender's median over that
of the first one. Where a workload has an axis (size of the items, threads, readers, backlog), a contender takes part
once for each place on it, and is compared with the first contender at the same place. What is not installed is left
out, and so is what the disk has no room for; the table says why. ``goals`` are the quotients that the project is held
to (``goals.py``: ``python -m bench goals FILE``), ``python -m bench.plots FILE`` draws the results, ``python -m
bench.micro`` measures single calls with pyperf.

How not to misread it. The figures are those of one machine at one moment: compare them within a run, never across runs
or machines. Look at the minimum for what the code costs, and at the spread for how far to believe the median. The
contenders do not promise the same: the floor forgets everything, queuelib loses what a process had put that is
killed, a database and persist-queue survive that. Where the sync mode is not in the name, nobody has waited for a disk,
and a power cut takes the last puts. The files are in the page cache: nothing here says how fast a disk is, except the
rows with ``always``, FULL or ``sync``, which say little else. Items have 100 bytes unless a workload says otherwise;
with larger ones copying grows and the differences shrink. A slow contender does fewer items in a round; its figure is
still for one item, but a queue that slows down as it grows looks better than it is by that. A server's figure is that
of a client that waits for every answer: what it pays for is the way there and back, and many clients at once get more
out of it. lmdb and rocksdict are stores, and the queue on top of them is a number that the adapter keeps in memory.
Threads share one interpreter: with its lock, more of them do not make more of anything but waiting.
"""
