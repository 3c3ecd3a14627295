"""The outbox beside other queues of jobs, each in a process of its own: ``python -m bench.outbox``.

Workloads:
    put              a transaction of the caller's with an INSERT of its own, in PostgreSQL: that alone, a second INSERT
                     into the table of the hand-written loop, and our put instead; peers, too. 1 thread and 8.
    put-sqlite       the same in a SQLite file.
    batch            a thousand jobs in one transaction; the floor is the fastest of three ways to INSERT them.
    batch-sqlite     the same in a SQLite file.
    jobs             10,000 jobs wait in PostgreSQL; a consumer with four threads, or what a peer has in their place,
                     runs them. dramatiq and rq with Redis are there for orientation.
    sqlite           the same in a SQLite file with a write-ahead log, and in the journal store.
    relay            100,000 jobs from PostgreSQL into a journaled queue.
    latency          one job at a time, 20 to 180 ms apart, put by another process.
    latency-sqlite   the same through a SQLite file.
    claims           how long a claim takes with 1,000 jobs that are ready, alone and beside a million that are ready,
                     done, in error, or in a queue that is nobody's; by the statements themselves, without a consumer
                     and without the syncs of their commits (synchronous_commit is off there, and only there).
    claims-sqlite    the same in a SQLite file.
    idle             a consumer that has nothing to do: processor time of its own and of the server, statements.
    held             1,000 jobs a second, while another transaction stays open for ``--minutes``: jobs started, time of
                     a claim and wait of a job, in the order of time in the results (``make plots`` draws them).

PostgreSQL is a cluster of its own in a temporary folder, with default settings (fsync is on), over a Unix socket; each
contender gets a fresh one, which is a copy of one that initdb has made. Payloads have 100 bytes, handlers do nothing.
The floor is what one writes by hand around ``FOR UPDATE SKIP LOCKED``: it claims up to 100 jobs, or one, in a
transaction, and marks them in another; it has no retries, leases, keys or delays.

How not to misread it. A figure is that of one machine and one disk: the row "floor, 1 INSERT" is mostly the time of a
sync, and where that is free, the rest looks large. Compare within a run. Throughput is from the start of the first
handler until the last job is marked; the jobs are there before the consumer starts, so what is compared is draining,
not a steady stream. Contenders do not promise the same: huey removes a job before it runs it, and one that was running
when the process died is lost; its put is a transaction of its own, after the caller's. rq runs each job in a fork,
unless the name says otherwise. Redis with "everysec" loses up to a second of jobs with the power, with "always" none.
procrastinate runs handlers that are coroutines, which is quicker for it than threads. A peer that keeps what is done
(ours, procrastinate, the floor) has more to write than one that deletes. The consumer, the server and whoever puts
share the cores: with few of them, processor time says more than the clock. Latency counts from the return of the commit
to the start of the handler; it can be negative, where a handler starts before the committer has its answer. Of huey
with SQLite it is how often it looks, which slows down the longer there is nothing. In ``held`` a peer that does not
reach 1,000 jobs a second has a backlog as well as dead rows.
"""
