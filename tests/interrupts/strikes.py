"""Raising KeyboardInterrupt at the n-th place of a call where CPython looks for signals.

CPython looks for them at the start of a Python function, after the call of a C function (a class is one, and so is a
``next`` that resumes a generator) and at a jump backwards; nowhere else, and not when a Python function returns to
another. A tracer counts these places in the library's own frames, and in those of the helpers it is written with, and
raises at the n-th, for n = 1, 2, ... until the call comes to its end undisturbed.
"""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

HELPERS = ("/contextlib.py",)
"""Modules of others whose frames count as the library's: it depends on what they do when they are interrupted."""
BACKWARD = ("JUMP_BACKWARD", "POP_JUMP_BACKWARD")
CALLS = ("CALL", "CALL_FUNCTION_EX")
MONITORING: Any = getattr(sys, "monitoring", None)
"""Python 3.11 has none."""


def is_ours(code: CodeType) -> bool:
    """Whether a place in ``code`` counts: the library's, but for the fakes that stand in for the disk of others."""
    path = code.co_filename
    if code.co_name == "__del__":
        return False  # what is raised there is not raised to anybody
    return ("/kestrelpy/" in path and "/kestrelpy/testing/" not in path) or path.endswith(HELPERS)


class Hanging(BaseException):
    """A call that was to return does not. Not an ``Exception``, so that nothing on its way takes it for an error."""


@contextmanager
def watchdog(seconds: float) -> Iterator[None]:
    """Raise ``Hanging`` in the main thread if the block takes longer: it would wait for a lock for ever."""

    def bark(_: int, frame: FrameType | None) -> None:
        where = "" if frame is None else f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
        raise Hanging(f"still at {where} after {seconds} s")

    before = signal.signal(signal.SIGALRM, bark)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _interrupt() -> None:
    raise KeyboardInterrupt


class Interrupter:
    """Raises at the n-th place, or calls another ``handler`` there; ``places`` says how many it came to."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.places = 0
        self.where = ""
        self.handler: Callable[[], object] = _interrupt

    def run(self, call: Callable[[], object]) -> bool:
        """True if ``call`` was interrupted. Nothing is collected meanwhile: that would be other code's places."""
        gc.disable()
        self._start()
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            self._stop()
            gc.enable()
        return False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done meanwhile is not interrupted."""
        self._stop()
        try:
            yield
        finally:
            self._start()

    def _place(self, code: CodeType, what: str, line: int) -> None:
        self.places += 1
        if self.places == self.at:
            self.where = f"{what} in {code.co_qualname}, line {line}"
            self.handler()

    def _start(self) -> None:
        raise NotImplementedError

    def _stop(self) -> None:
        raise NotImplementedError


class Monitor(Interrupter):
    """By ``sys.monitoring``, which sees all threads: only the one that calls is struck, as by a signal. Not at jumps:
    what is raised at their event is not handled as an error of a signal is.
    """

    def _start(self) -> None:
        event = MONITORING.events
        self._thread = threading.get_ident()
        MONITORING.use_tool_id(MONITORING.DEBUGGER_ID, "interrupts")
        register = functools.partial(MONITORING.register_callback, MONITORING.DEBUGGER_ID)
        register(event.PY_START, lambda code, _: self._seen(code, "start"))
        register(event.C_RETURN, lambda code, _, called, __: self._seen(code, f"after {called}"))
        MONITORING.set_events(MONITORING.DEBUGGER_ID, event.PY_START | event.CALL)

    def _seen(self, code: CodeType, what: str) -> None:
        if is_ours(code) and threading.get_ident() == self._thread:
            self._place(code, what, code.co_firstlineno)

    def _stop(self) -> None:
        MONITORING.set_events(MONITORING.DEBUGGER_ID, 0)
        MONITORING.free_tool_id(MONITORING.DEBUGGER_ID)


BEGINS = -2


class Tracer(Interrupter):
    """For Python 3.11: C functions by ``sys.setprofile``, whose callback raises as from the call itself; the rest by
    tracing opcodes.

    A class that is called raises there at the opcode behind the call. Where another handler is in charge by then (the
    call is what a ``with`` block returns), no signal is handled so, and that is not a place.
    """

    _codes: dict[CodeType, Layout] = {}  # noqa: RUF012 - of code, which does not change; for all tracers

    def __init__(self, at: int) -> None:
        super().__init__(at)
        # Where the opcode is that ran last; -1: there is nothing to come of it.
        self._last: dict[FrameType, int] = {}

    def _start(self) -> None:
        sys.settrace(self._enter)
        sys.setprofile(self._profile)

    def _stop(self) -> None:
        sys.setprofile(None)
        sys.settrace(None)
        self._last.clear()  # a frame keeps what it has open

    def _profile(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "c_return" and is_ours(frame.f_code) and frame in self._last:
            self._last[frame] = -1
            self._place(frame.f_code, f"after {function.__qualname__}", frame.f_lineno)

    def _enter(self, frame: FrameType, event: str, _: object) -> Any:
        caller = frame.f_back
        if caller in self._last and _is_plain_call(frame.f_code, self._layout(caller).opname(self._last[caller])):
            self._last[caller] = -1
        if not is_ours(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._last[frame] = BEGINS
        return self._step

    def _step(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "return":
            self._last.pop(frame, None)
        if event != "opcode":
            return self._step
        last = self._last.get(frame, -1)  # -1 for a frame that goes on after a pause
        self._last[frame] = at = frame.f_lasti
        if last == BEGINS:
            self._place(frame.f_code, "start", frame.f_lineno)
        elif last >= 0:
            layout = self._layout(frame)
            opname = layout.opname(last)
            if opname.startswith(BACKWARD) or (opname in CALLS and layout.handler(last) == layout.handler(at)):
                self._place(frame.f_code, f"after {opname}", frame.f_lineno)
        return self._step

    def _layout(self, frame: FrameType) -> Layout:
        layout = self._codes.get(frame.f_code)
        if layout is None:
            layout = self._codes[frame.f_code] = Layout(frame.f_code)
        return layout


class Layout:
    """The opcodes of a function and who handles what is raised at them, by offset."""

    def __init__(self, code: CodeType) -> None:
        self._instructions = list(dis.get_instructions(code))
        self._opnames = {each.offset: each.opname for each in self._instructions}
        bytecode: Any = dis.Bytecode(code)
        self._entries = list(bytecode.exception_entries)

    def opname(self, offset: int) -> str:
        return self._opnames.get(offset, "")

    def handler(self, offset: int) -> int | None:
        return next((entry.target for entry in self._entries if entry.start <= offset < entry.end), None)

    def ends_a_with(self, offset: int) -> bool:
        """Whether the call at ``offset`` is the one of ``__exit__(None, None, None)`` at the end of a ``with``."""
        before = [
            each for each in self._instructions if each.offset <= offset and each.opname not in ("PRECALL", "CACHE")
        ]
        nones = [each.opname == "LOAD_CONST" and each.argval is None for each in before[-4:-1]]
        return before[-1].opname == "CALL" and nones == [True] * 3

    def unhandled_jumps(self) -> list[int]:
        """Lines with jumps backwards that are in a ``with`` or a ``try`` by their look, but not by the exception table:
        an interrupt there leaves a lock held. CPython 3.13 compiles ``while condition:`` so, and comprehensions with an
        ``if``.
        """
        return [
            (jump.positions and jump.positions.lineno) or 0
            for jump in self._instructions
            if jump.opname.startswith(BACKWARD)
            and "NO_INTERRUPT" not in jump.opname
            and self.handler(jump.offset) is None
            and self._cleans_up(self.handler(jump.argval))
        ]

    def _cleans_up(self, target: int | None) -> bool:
        """Whether the handler at ``target``, or one around it, is a ``with``, a ``finally`` or for all exceptions."""
        if target is None:
            return False
        ahead = [each for each in self._instructions if each.offset >= target][:5]
        if ahead[0].opname != "PUSH_EXC_INFO":  # of a comprehension, or of a generator
            return self._cleans_up(self.handler(target))
        names = [each.opname for each in ahead]
        return "CHECK_EXC_MATCH" not in names or any(each.argval == "BaseException" for each in ahead)


def _is_plain_call(code: CodeType, opname: str) -> bool:
    """Whether a frame was entered without C in between, so that nothing looks for signals when it returns."""
    through_c = code.co_name in ("__init__", "__new__", "__call__", "<lambda>") or code.co_flags & inspect.CO_GENERATOR
    return opname == "CALL" and not through_c


def interrupter_at(at: int) -> Interrupter:
    """What this version of Python has for it."""
    return Monitor(at) if sys.version_info >= (3, 12) else Tracer(at)
