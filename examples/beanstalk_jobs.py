"""Jobs for programs in any language: a beanstalkd-style server, and a client of it.

    python beanstalk_jobs.py

The server is ``kestrelpy serve beanstalk``, a process of its own. The client is greenstalk, which knows beanstalkd and
nothing of kestrelpy. In the middle the server is killed with SIGKILL and started again: the jobs are there. It needs
greenstalk. It prints:

    put 5 jobs
    the server was killed
    done: urgent
    done: mail 1
    failed: mail 2, again later
    done: mail 3
    buried: mail 4
    done: mail 2
    buried jobs: 1
"""

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator

import greenstalk

FOLDER = "beanstalk-data"


@contextlib.contextmanager
def server() -> Iterator[tuple[subprocess.Popen[str], tuple[str, int]]]:
    """``kestrelpy serve beanstalk`` on a free port, and its address. ``-f 0``: an answer means on disk."""
    command = [sys.executable, "-m", "kestrelpy", "serve", "beanstalk", "--dir", FOLDER, "-f", "0"]
    with subprocess.Popen([*command, "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        port = next(found[1] for line in process.stderr if (found := re.search(r"127\.0\.0\.1:(\d+)", line)))
        try:
            yield process, ("127.0.0.1", int(port))
        finally:
            process.terminate()


def work(client: greenstalk.Client[str]) -> None:
    """Take jobs until none comes for a second."""
    failed = set()
    while True:
        try:
            job = client.reserve(timeout=1)
        except greenstalk.TimedOutError:
            return
        if job.body == "mail 4":
            client.bury(job)  # a dead letter: look at it, and kick it
            print("buried:", job.body)
        elif job.body == "mail 2" and job.body not in failed:
            failed.add(job.body)
            client.release(job, delay=1)
            print(f"failed: {job.body}, again later")
        else:
            client.delete(job)
            print("done:", job.body)


def main() -> None:
    with server() as (process, address):
        with greenstalk.Client(address, use="mails") as client:
            for body in ("mail 1", "mail 2", "mail 3", "mail 4"):
                client.put(body, ttr=30)
            client.put("urgent", priority=0)
        print("put 5 jobs", flush=True)
        process.kill()
        process.wait()
        print("the server was killed", flush=True)
    with server() as (_, address), greenstalk.Client(address, use="mails", watch="mails") as client:
        work(client)
        print("buried jobs:", client.stats_tube("mails")["current-jobs-buried"])
        client.delete(client.peek_buried())


if __name__ == "__main__":
    main()
