"""The benchmarks: ``python -m bench``. Named workloads (``workloads.py``, ``scale.py``), rivals behind adapters.

How it measures. All contenders of a workload take part in every round, one after the other, each in a fresh folder, the
order turning by one each round, so that a noisy minute hits all of them. The first round is a warm-up and does not
count. Figures are the minimum, the median and the maximum over the rounds; ``times`` is a contender's median over that
of the first one.

How not to misread it. The figures are those of one machine at one moment: compare them within a run, never across runs
or machines. Look at the minimum for what the code costs, and at the spread for how far to believe the median. The
contenders do not promise the same: the floor forgets everything, queuelib loses what a process had put that is
killed, a database and persist-queue survive that. Where the sync mode is not in the name, nobody has waited for a disk,
and a power cut takes the last puts. The files are in the page cache: nothing here says how fast a disk is, except the
rows with ``always`` or FULL, which say little else. Items have 100 bytes unless a workload says otherwise; with larger
ones copying grows and the differences shrink. A slow contender does fewer items in a round; its figure is still for one
item, but a queue that slows down as it grows looks better than it is by that.
"""
