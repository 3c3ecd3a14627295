"""Whole lives on other systems than Linux, as far as Linux can play them.

What another system has not is taken away before anything is imported, in a process of its own. So what looks for a call
at its import is seen, too; ``tests/unit/disk/test_systems.py`` takes calls away from a library that is there.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

Script = Callable[..., str]

GONE = {
    "posix_fallocate": "del os.posix_fallocate",
    "posix_fadvise": "del os.posix_fadvise, os.POSIX_FADV_DONTNEED",
    "fdatasync": "del os.fdatasync",
    "pwritev": "del os.pwritev, os.preadv",
    "sched_getaffinity": "del os.sched_getaffinity, os.sched_setaffinity",
    "copy_file_range": "del os.copy_file_range, os.splice",
    "O_PATH": "del os.O_PATH, os.O_TMPFILE",
    "descriptors": "del os.memfd_create, os.eventfd, os.pidfd_open",
    "SOCK_CLOEXEC": "del socket.SOCK_CLOEXEC, socket.SOCK_NONBLOCK",
    "epoll": "del select.epoll",
    "CLOCK_BOOTTIME": "del time.CLOCK_BOOTTIME",
    "mmap.resize": "mmap.mmap = Map",
    "renameat2": "ctypes.CDLL = NoCalls",
    "proc": "builtins.open = opened",
}
"""What macOS has not, with the statement that takes it away."""
START = """
import builtins, ctypes, errno, fcntl, mmap, os, select, socket, sys, time

class Map(mmap.mmap):
    @property
    def resize(self):
        raise AttributeError("resize")

class NoCalls:
    def __init__(self, name, **options):
        pass

def opened(path, *rest, real=open, **options):
    if str(path).startswith("/proc"):
        raise FileNotFoundError(errno.ENOENT, "no such table", path)
    return real(path, *rest, **options)

assert not any(name.startswith("kestrelpy") for name in sys.modules)
"""
WORK = """
from pathlib import Path
from tests.unit.disk.test_systems import ITEMS, use_everything
from kestrelpy import JournaledQueue
from kestrelpy.server import serve_in_thread

folder = Path(sys.argv[1])
use_everything(folder / "everything")
with serve_in_thread(folder / "served", sync="always") as server:
    with socket.create_connection(server.addresses[0]) as client:
        client.sendall(b"put 0 0 60 5\\r\\nhello\\r\\n")
        assert client.recv(100) == b"INSERTED 1\\r\\n"
queue = JournaledQueue(folder / "killed", "jobs", sync="always", segment_bytes=1_600_000)
for data in ITEMS:
    queue.put(data)
queue.commit_many([queue.get() for _ in range(3)])
queue.checkpoint(durable=True)
print("worked", flush=True)
os._exit(9)
"""
AFTER = """
from tests.unit.disk.test_systems import ITEMS
from kestrelpy import JournaledQueue, verify
from kestrelpy.cli import main
from kestrelpy.work import WorkQueue

folder = sys.argv[1]
report = verify(folder + "/killed", "jobs")
assert report.ok, report
with JournaledQueue(folder + "/killed", "jobs") as queue:
    assert [item.data for item in queue.get_many(1000)] == ITEMS[3:]
with WorkQueue(folder + "/served", "work") as jobs:
    assert jobs.peek(1).body == b"hello"
assert main(["verify", folder + "/killed", "jobs"]) == 0
"""


def live_twice(script: Script, folder: object, gone: str) -> None:
    """Work and be killed, and open it again: both without what is gone."""
    assert script(START + gone + WORK, folder, status=9) == "worked"
    script(START + gone + AFTER, folder)


@pytest.mark.parametrize("name", GONE)
def test_a_life_without(name: str, script: Script, tmp_path: object) -> None:
    live_twice(script, tmp_path, GONE[name])


def test_a_life_without_any_of_them(script: Script, tmp_path: object) -> None:
    live_twice(script, tmp_path, "\n".join(GONE.values()))


def test_what_is_needed_all_the_same_is_seen(script: Script, tmp_path: object) -> None:
    """Else the tests above would see nothing."""
    said = script(START + "del os.pread" + "\ntry:" + re.sub("^", "    ", WORK, flags=re.M) + NAMED, tmp_path)
    assert said == "this system has no pread"


NAMED = """
except OSError as error:
    print(error.strerror.partition(":")[0])
"""


# -- what macOS has ----------------------------------------------------------------------------------------------------

SYNCS = """
from collections import Counter
count = Counter()

def control(descriptor, call, *rest, real=fcntl.fcntl):
    if call != 51:
        return real(descriptor, call, *rest)
    count["full"] += 1
    return 0

def weak(descriptor):
    count["weak"] += 1

fcntl.F_FULLFSYNC, fcntl.fcntl, os.fsync = 51, control, weak
del os.fdatasync
"""
COUNT = """
from pathlib import Path
from tests.unit.disk.test_systems import use_everything
use_everything(Path(sys.argv[1]))
print(count["full"] > 50, count["weak"])
"""


def test_no_sync_leaves_anything_in_the_drives_cache(script: Script, tmp_path: object) -> None:
    assert script(START + SYNCS + COUNT, tmp_path) == "True 0"


@pytest.mark.parametrize("place", ["file", "real"])
def test_a_weaker_sync_is_seen(place: str, script: Script, tmp_path: object) -> None:
    """Of files, or of the names in folders."""
    planted = {
        "file": "from kestrelpy._disk import file\nfile.sync_whole = os.fsync\n",
        "real": "from kestrelpy._disk import real\nreal.sync_names = os.fsync\n",
    }
    _, weak = script(START + SYNCS + planted[place] + COUNT, tmp_path).split()
    assert int(weak) > 0


# -- Windows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kestrelpy", "kestrelpy.work", "kestrelpy.cli"])
def test_an_import_on_windows_says_so_at_once(name: str, script: Script) -> None:
    said = script(
        f"""
        import sys
        sys.platform, sys.modules["fcntl"] = "win32", None
        try:
            import {name}
        except ImportError as error:
            print(error)
        print([name for name in sys.modules if name.startswith("kestrelpy.")])
        """
    )
    reason, modules = said.splitlines()
    assert reason.startswith("kestrelpy runs on Linux and macOS, and not on Windows")
    assert modules == "[]", "nothing of it is half there"
