"""What systemd and a service say to each other: sd_notify(3), sd_watchdog_enabled(3) and sd_listen_fds(3).

Rules:
1. Without the variables of systemd (``NOTIFY_SOCKET``, ``WATCHDOG_USEC``, ``LISTEN_FDS``) nothing here does anything.
2. A message that cannot be sent is lost: it is no reason for a service to stop.
3. The variables are for this process. They are taken out of the environment when they are read, so that no child
   believes that it is the service.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING

from kestrelpy.cli._common import CommandError

if TYPE_CHECKING:
    import asyncio

__all__ = ["PassedSocket", "Supervisor", "passed_sockets"]

_FIRST_SOCKET = 3
"""Of ``SD_LISTEN_FDS_START``."""
_SEND_SECONDS = 1.0
"""So long a message may wait for room in the supervisor's socket."""

PassedSocket = tuple[str, socket.socket]
"""A socket, and the name that ``FileDescriptorName=`` gives it; empty if it has none."""


class Supervisor:
    """systemd, if it has started this process as a service with ``Type=notify``; else nobody.

    Not thread-safe: it is used on the thread of the server's loop, and before and after it.
    """

    def __init__(self) -> None:
        self._address = _socket_address(os.environ.pop("NOTIFY_SOCKET", ""))
        self.beat_seconds = _beat_seconds()
        """How often the watchdog wants a sign of life, halved; 0: there is no watchdog."""
        self._is_stopping = False

    def ready(self, status: str) -> None:
        """It serves. ``status`` is for people: ``systemctl status`` shows it."""
        if not self._is_stopping:
            self._tell("READY=1", f"STATUS={status}")

    def status(self, text: str) -> None:
        """Show ``text`` in ``systemctl status``."""
        self._tell(f"STATUS={text}")

    def reloaded(self) -> None:
        """The configuration was read again. That is one step of the loop, so its begin and its end are told at once."""
        if not self._is_stopping:
            self._tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
            self._tell("READY=1")

    def stopping(self, status: str) -> None:
        """It ends. Nobody is told that it is ready from then on."""
        self._is_stopping = True
        self._tell("STOPPING=1", f"STATUS={status}")

    def beat(self) -> None:
        """A sign of life, for the watchdog. Without one this does nothing."""
        if self.beat_seconds:
            self._tell("WATCHDOG=1")

    def beat_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give signs of life from this loop, from now on: a loop that hangs gives none, and systemd acts."""
        if self.beat_seconds:
            self.beat()
            loop.call_later(self.beat_seconds, self.beat_on, loop)

    def _tell(self, *lines: str) -> None:
        if not self._address:
            return
        text = "\n".join(" ".join(line.split()) for line in lines)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
            one.settimeout(_SEND_SECONDS)
            one.sendto(text.encode(errors="backslashreplace"), self._address)


def _socket_address(text: str) -> str:
    """The address of a path or of an abstract name (``@name``); empty for one of another kind."""
    if text.startswith("@"):
        return "\0" + text[1:]
    return text if text.startswith("/") else ""


def _beat_seconds() -> float:
    """Half of the watchdog's limit, as sd_watchdog_enabled(3) advises; 0 if there is none, or for another process."""
    limit, process = os.environ.pop("WATCHDOG_USEC", ""), os.environ.pop("WATCHDOG_PID", "")
    if not (limit.isascii() and limit.isdigit()) or process not in ("", str(os.getpid())):
        return 0.0
    return int(limit) / 2e6


def passed_sockets(opened: contextlib.ExitStack) -> list[PassedSocket]:
    """The sockets that systemd has opened for this process, in order; ``opened`` closes them.

    Closing them here lets nobody wait in vain: systemd has them too, and a client that connects between two lives of
    this service is served by the second one. Raises ``CommandError``.
    """
    said = {name: os.environ.pop(f"LISTEN_{name}", "") for name in ("PID", "FDS", "FDNAMES")}
    if said["PID"] != str(os.getpid()):
        return []
    count = said["FDS"] or "0"
    if not (count.isascii() and count.isdigit()):
        raise CommandError(f"LISTEN_FDS must be a number of sockets, not {count!r}", status=2)
    names = said["FDNAMES"].split(":")
    passed = []
    for at in range(int(count)):
        one = _listening(_FIRST_SOCKET + at, opened)
        passed.append((names[at] if at < len(names) else "", one))
    return passed


def _listening(descriptor: int, opened: contextlib.ExitStack) -> socket.socket:
    try:
        os.set_inheritable(descriptor, False)
        one = opened.enter_context(socket.socket(fileno=descriptor))
        listens = one.type == socket.SOCK_STREAM and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise CommandError(f"descriptor {descriptor} of LISTEN_FDS: {error.strerror}", status=2) from None
    if not listens:
        text = f"descriptor {descriptor} of LISTEN_FDS does not listen: a ListenStream= is wanted, with Accept=no"
        raise CommandError(text, status=2)
    return one
