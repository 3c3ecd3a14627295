"""Forks, the end of the interpreter, and queues that nobody closed; each in a Python of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import drain

from kestrelpy import JournaledQueue


# R26: the child is told, the parent is not disturbed.
@pytest.mark.parametrize("waiting", [False, True])
def test_r26_a_forked_child_is_told_and_the_parent_is_not_disturbed(waiting: bool, script: Any, folder: Path) -> None:
    told = script(
        """
        import os, sys, threading, time, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
        from kestrelpy import ForkedQueue, JournaledQueue, QueueLocked, open_reader
        folder, waiting = sys.argv[1], sys.argv[2] == "True"
        queue = JournaledQueue(folder, "jobs")
        reader = queue.reader("a")
        other = open_reader(folder, "jobs", "b", start="earliest")
        queue.put_many([b"1", b"2"])
        item = reader.get()
        reader.get().commit()
        got = []
        if waiting:
            thread = threading.Thread(target=lambda: got.append(reader.get(timeout=20).data))
            thread.start()
            while not reader.waiter_count:
                time.sleep(0.001)
        parent = os.getpid()
        child = os.fork()
        if not child:
            status = 1
            try:
                calls = [
                    lambda: queue.put(b"x"), lambda: queue.put(b"x", expires_in=1), lambda: queue.put_many([b"x"]),
                    lambda: queue.put_many([]), lambda: queue.put_future(b"x"), queue.sync, queue.checkpoint,
                    queue.flush,
                    queue.reader, lambda: queue.reader("c"), lambda: queue.drop_reader("a"), reader.get,
                    reader.get_nowait,
                    lambda: reader.get_many(2), reader.get_future, reader.peek, item.commit, item.abort, reader.flush,
                    reader.checkpoint, lambda: reader.seek(1), reader.discard_expired, other.get_nowait, other.flush,
                ]
                for number, call in enumerate(calls):
                    try:
                        call()
                    except ForkedQueue as error:
                        assert error.opened_by == parent
                    else:
                        raise AssertionError(number)
                for attempt in (lambda: JournaledQueue(folder, "jobs"), lambda: open_reader(folder, "jobs", "b")):
                    try:
                        attempt()
                    except QueueLocked as error:
                        assert error.pid == parent
                    else:
                        raise AssertionError("the parent's lock was lost")
                with JournaledQueue(folder, "mine") as mine:  # one of its own works
                    mine.put(b"child")
                    assert mine.get(timeout=5).data == b"child"
                queue.close()
                reader.close()
                other.close()
                status = 0
            except BaseException:
                import traceback
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        item.commit()
        queue.put(b"3")
        if waiting:
            thread.join(20)
            assert got == [b"3"]
        assert len(other.get_many(5)) >= 2
        other.close()
        queue.close()
        with JournaledQueue(folder, "jobs") as again:
            assert again.stats().tail_id == 3
        print("undisturbed")
        """,
        folder,
        waiting,
    )
    assert told == "undisturbed"


def test_diskcache_300_a_child_does_not_hang_on_a_lock_that_was_held(script: Any, folder: Path) -> None:
    """A fork while another thread is in the middle of a put: the child's calls raise and do not wait for its locks."""
    assert (
        script(
            """
        import os, sys, threading, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        from kestrelpy import ForkedQueue, JournaledQueue
        queue = JournaledQueue(sys.argv[1], "jobs", sync="never")
        reader = queue.reader()
        stop = threading.Event()
        def work():
            while not stop.is_set():
                queue.put(b"x")
                reader.get_nowait().commit()
        thread = threading.Thread(target=work)
        thread.start()
        for _ in range(10):
            child = os.fork()
            if not child:
                status = 0
                for call in (lambda: queue.put(b"y"), reader.get, queue.close, reader.flush):
                    try:
                        call()
                    except ForkedQueue:
                        pass
                    except BaseException:
                        status = 1
                os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
        stop.set()
        thread.join()
        queue.close()
        print("done")
        """,
            folder,
        )
        == "done"
    )


# R29: a blocked get must not keep the interpreter from ending.
@pytest.mark.parametrize("how", ["thread", "future", "put", "outside"])
def test_r29_the_interpreter_ends_with_somebody_waiting(how: str, script: Any, folder: Path) -> None:
    told = script(
        """
        import sys, threading, time
        from kestrelpy import FullPolicy, JournaledQueue, QueueClosed, ReaderConfig, open_reader
        folder, how = sys.argv[1:]
        limited = ReaderConfig(max_items=1, full_policy=FullPolicy.BLOCK)
        queue = JournaledQueue(folder, "jobs", default_reader=limited)
        reader = open_reader(folder, "jobs", "far") if how == "outside" else queue.reader()
        if how == "put":
            queue.put(b"full")
        def work():
            try:
                if how == "put":
                    queue.put(b"x", timeout=None)
                elif how == "future":
                    reader.get_future().result()
                else:
                    reader.get()
            except QueueClosed:
                print("woken", flush=True)
        threading.Thread(target=work).start()  # not a daemon
        while not (reader.waiter_count or queue._room):
            time.sleep(0.001)
        """,
        folder,
        how,
    )
    assert told == "woken"


def test_what_was_committed_is_saved_at_the_end_of_the_interpreter(script: Any, folder: Path) -> None:
    script(
        """
        import sys
        from kestrelpy import JournaledQueue
        queue = JournaledQueue(sys.argv[1], "jobs", sync="never")
        queue.put_many([b"1", b"2", b"3"])
        queue.get().commit()
        queue.get()
        """,
        folder,
    )
    with JournaledQueue(folder, "jobs") as queue:
        assert drain(queue) == [b"2", b"3"]


def test_nothing_is_saved_when_the_process_just_goes(script: Any, folder: Path) -> None:
    script(
        """
        import os, sys
        from kestrelpy import JournaledQueue
        queue = JournaledQueue(sys.argv[1], "jobs", sync="never")
        queue.put_many([b"1", b"2"])
        queue.get().commit()
        os._exit(0)
        """,
        folder,
    )
    with JournaledQueue(folder, "jobs") as queue:
        assert drain(queue) == [b"1", b"2"], "puts survive, commits since the last checkpoint come again"


def test_a_queue_left_to_the_collector_warns(script: Any, folder: Path) -> None:
    told = script(
        """
        import gc, sys, warnings
        from kestrelpy import JournaledQueue
        warnings.simplefilter("always")
        caught = []
        warnings.showwarning = lambda message, category, *_: caught.append(category.__name__)
        queue = JournaledQueue(sys.argv[1], "jobs", sync="never")
        queue.put(b"x")
        del queue
        gc.collect()
        print(*caught)
        """,
        folder,
    )
    assert "ResourceWarning" in told.split()
