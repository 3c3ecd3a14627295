"""The write side of a queue: how a put gets in and onto the disk, and how a queue ends.

``put_path`` has the puts with an option, and futures of puts; ``options`` checks what they are given. ``backpressure``
is the line of producers that wait for room. ``syncer`` says when to sync, ``group_commit`` shares one sync between all
that wait for it. ``maintenance`` saves checkpoints and retires segments in the background. ``open_journal`` has the
locks, the journal and the archive of an open queue. ``ending`` closes, erases and abandons it. ``status`` says whether
it can be used.
"""
