"""Letting the n-th allocation of an operation fail, and checking what is left: in a process of its own.

``_testcapi.set_nomemory(n, m)`` makes every allocation from the n-th to before the m-th fail, wherever it is made: in
the library, in the modules it uses, or in the interpreter itself, which may not survive that. So this is a program; a
``Supervisor`` starts it again behind a place where the interpreter died, and counts that apart.

    python -m tests.interrupts.allocations OPERATION SEED FIRST STEP LENGTH SECONDS

prints a line for each place: its number, and what became of it:

- ``held``: the operation raised MemoryError, and all that must hold holds
- ``unharmed``: it never noticed
- ``not ours``: the allocation was made by the test itself, or by the fake disk, which is not made for that
- ``lock kept``: CPython found no memory for the arguments of a lock's ``__exit__``, and did not release it: nothing in
  Python can help that
- ``interpreter erred``: it raised SystemError, "error return without exception set"; what is left proves nothing
- ``broken``, and what does not hold
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import random
import subprocess
import sys
import time
from collections import Counter
from typing import Any, TypeVar

from tests.support.paths import ROOT

Stack = TypeVar("Stack", bound=contextlib.ExitStack[Any])
PLANTED = "planted"
"""The name of an operation with a fault."""
ENDLESS = 1 << 30
CALM = 12
"""After so many places in a row at which nothing happened there are no more."""


def available() -> bool:
    """Whether this Python can be made to run out of memory."""
    try:
        import _testcapi
    except ImportError:
        return False
    return hasattr(_testcapi, "set_nomemory")


def strike(name: str, at: int, length: int, seed: int) -> str:
    """Let the allocations ``at`` to before ``at + length`` of operation ``name`` fail; what became of it."""
    import _testcapi

    from tests.interrupts.operations import OPERATIONS, Prepared
    from tests.interrupts.scenes import Broken
    from tests.interrupts.strikes import Hanging, Interrupter, watchdog

    class Starver(Interrupter):
        """For an operation in the middle of which the test does something: from then on there is memory."""

        def _start(self) -> None:
            """What was stopped stays so."""

        def _stop(self) -> None:
            _testcapi.remove_mem_hooks()

    global _entered_with
    _entered_with = None
    contextlib.ExitStack.__enter__ = _enter  # type: ignore[method-assign]
    prepared: Prepared = (OPERATIONS[name] if name != PLANTED else _planted)(Starver(0))
    call, failed, excuse = prepared.call, False, ""
    gc.collect()
    gc.disable()
    try:
        with watchdog(3.0):
            try:
                _testcapi.set_nomemory(at, at + length)
                try:
                    call()
                finally:
                    _testcapi.remove_mem_hooks()
            except (MemoryError, RuntimeError, SystemError) as error:
                if isinstance(error, RuntimeError) and "lock" not in str(error):  # a lock that can't be made
                    raise
                failed, excuse = True, _excuse(error) if name in OPERATIONS else ""
            if excuse:
                prepared.scene.vanish()
                return excuse
            if prepared.afterwards is not None and (failed or prepared.always):
                prepared.afterwards()
            prepared.scene.check(random.Random(seed))
    except (Exception, Hanging) as error:
        prepared.scene.vanish()
        cause = error.__context__ or _entered_with
        while cause is not None and not isinstance(cause, MemoryError):
            cause = cause.__context__
        if isinstance(cause, MemoryError) and (excuse := _excuse(cause)):
            return excuse
        kind = "" if isinstance(error, Broken) else f"{type(error).__name__}: "
        return f"broken: {kind}{error}"
    finally:
        gc.enable()
    return "held" if failed else "unharmed"


_entered_with: BaseException | None = None


def _enter(self: Stack) -> Stack:
    """An exit stack forgets what was being raised when it was entered, if one of its callbacks raises."""
    global _entered_with
    _entered_with = sys.exc_info()[1]
    return self


def _planted(_: Any) -> Any:
    """A fault to be caught: a commit that takes the item out first."""
    from kestrelpy._reading.reader import Reader, checkpointer_of
    from tests.interrupts.operations import OPERATIONS

    def commit(self: Reader, item_or_id: Any) -> None:
        backlog, item = checkpointer_of(self).backlog, item_or_id
        with backlog.lock:
            del backlog.opened[item.id]
            backlog.progress.release(item.id, len(bytes(bytearray(item.data))))

    prepared = OPERATIONS["commit"](_)
    scene, original = prepared.scene, Reader.commit

    def call() -> None:
        Reader.commit = commit  # type: ignore[method-assign]
        try:
            scene.user.commit(scene.reader, 2)
        finally:
            Reader.commit = original  # type: ignore[method-assign]

    prepared.call = call
    return prepared


def _excuse(error: BaseException) -> str:
    """Why what is left proves nothing, if so: by where it was raised."""
    if isinstance(error, SystemError):
        return "interpreter erred"
    from tests.interrupts.strikes import Layout, is_ours

    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    if not is_ours(code) and any(part in code.co_filename for part in ("/tests/", "/kestrelpy/testing/")):
        return "not ours"
    return "lock kept" if Layout(code).ends_a_with(trace.tb_lasti) else ""


def main(arguments: list[str]) -> None:
    name, seed, first, step, length, seconds = arguments[0], *map(int, arguments[1:5]), float(arguments[5])
    faulthandler.enable()
    strike(name, ENDLESS, 1, seed)  # undisturbed: what is made once for a process is made
    deadline, calm = time.monotonic() + seconds, 0
    at = first
    while calm < CALM and time.monotonic() < deadline:  # behind its last allocation nothing is disturbed any more
        print(at, end=" ", flush=True)
        result = strike(name, at, length, seed)
        print(result.replace("\n", " "), flush=True)
        calm = calm + 1 if result == "unharmed" else 0
        at += step
        if result in ("lock kept", "interpreter erred"):  # it may be one that all queues of the process use
            print("again", flush=True)
            return
    print("done", flush=True)


class Supervisor:
    """Runs the program over one operation. ``counts``: places that held, were unharmed, or at which the interpreter
    itself died; ``broken``: what did not hold.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.broken: list[str] = []

    def run(self, *, first: int = 1, step: int = 1, length: int = 1, seconds: float = 60.0) -> Counter[str]:
        deadline = time.monotonic() + seconds
        at: int | None = first
        while at is not None and time.monotonic() < deadline:
            arguments = [self.name, self.seed, at, step, length, deadline - time.monotonic()]
            command = [sys.executable, "-W", "ignore", "-m", "tests.interrupts.allocations", *map(str, arguments)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=False, cwd=ROOT)
            at = self._read(done, step)
        return self.counts

    def _read(self, done: subprocess.CompletedProcess[str], step: int) -> int | None:
        """Count what one process has told; where the next one begins, if it died."""
        at = None
        for line in done.stdout.splitlines():
            number, _, result = line.partition(" ")
            if number == "done":
                return None
            if number == "again" and at is not None:
                return at + step
            at = int(number)
            if result.startswith("broken"):
                self.broken.append(f"{self.name}, allocation {at}, seed {self.seed}: {result}")
                self.counts["broken"] += 1
            elif result:
                self.counts[result] += 1
        if at is None:
            raise RuntimeError(f"the program does not even begin: {done.stderr[-2000:]}")
        self.counts["the interpreter died"] += 1
        return at + step


if __name__ == "__main__":
    main(sys.argv[1:])
