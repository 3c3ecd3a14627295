"""A real file system of one's own, in memory, whose power can be cut. For root, on Linux.

``LoopFileSystem`` makes a file system on a loop device over a file that has no name (``memfd_create``), so that its
syncs cost no disk, and mounts it. ``shut_down`` is the power cut: from then on nothing reaches the device, and what
only the page cache or the unwritten log knows is gone (``FS_IOC_SHUTDOWN`` with no log flush). ``remount`` is the power
coming back: unmount, mount, replay of the log.

What it shows is what these file systems do, no more: both persist the name of a new file when the file is synced, so a
missing sync of a directory is not seen here; the simulated disk sees that.

Every mount has a loop device of its own, which the system detaches with the unmounting: otherwise what the device's
page cache knows would survive the power cut. A mount outlives its process, unless that has called ``own_mounts``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import shutil
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Literal

Kind = Literal["ext4", "xfs", "btrfs"]

SMALLEST_MB = {"ext4": 16, "xfs": 300, "btrfs": 128}
"""Below this mkfs refuses, or leaves no room for a log."""

MAKE = {
    "ext4": ("mkfs.ext4", "-q", "-F", "-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1"),
    "xfs": ("mkfs.xfs", "-q", "-f", "-K"),
    "btrfs": ("mkfs.btrfs", "-q", "-f", "-K"),
}
PATIENCE = 20.0
"""Seconds after which a file system that is still busy counts as stuck."""

_SHUTDOWN, _NO_LOG_FLUSH = 0x8004587D, 2
_WAIT_WRITE_WAIT = 7
_LOOP_CONTROL_GET_FREE, _LOOP_CONFIGURE, _LOOP_AUTOCLEAR = 0x4C82, 0x4C0A, 4
_LOOP_CONFIG = struct.Struct("II 5Q 4I 64s64s32s2Q 8Q")
_NEW_MOUNTS, _RECURSIVE, _PRIVATE, _DETACH = 0x00020000, 0x4000, 1 << 18, 2

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}", str(arguments))


def mount(source: str, target: str, kind: str, options: str = "") -> None:
    """``mount(2)``."""
    _call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(0), options.encode())


def unmount(target: str) -> None:
    """``umount(2)``; waits while processes that were killed still have files open there."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return _call("umount2", target.encode(), 0)
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.001)


def write_back(path: str) -> None:
    """The bytes of the file reach the device, and neither its size nor its name."""
    number = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _call("sync_file_range", number, ctypes.c_int64(0), ctypes.c_int64(0), _WAIT_WRITE_WAIT)
    finally:
        os.close(number)


def let_go(target: str) -> None:
    """Unmount whatever happens: what is still in use is taken out of sight and goes when its last user does."""
    with contextlib.suppress(OSError):
        _call("umount2", target.encode(), _DETACH)


def own_mounts() -> None:
    """From here on, what this process and its children mount is seen by nobody else and ends with the last of them."""
    _call("unshare", _NEW_MOUNTS)
    _call("mount", None, b"/", None, ctypes.c_ulong(_RECURSIVE | _PRIVATE), None)


class LoopFileSystem:
    """A file system of ``size_mb`` mounted below ``folder``, at ``path``; a context manager. Raises ``OSError``."""

    def __init__(self, kind: Kind, size_mb: int, folder: str | os.PathLike[str]) -> None:
        self.kind = kind
        self.cuts = 0
        self.path = str(Path(folder).absolute() / f"{kind}.mount")
        os.makedirs(self.path, exist_ok=True)
        self._image = os.memfd_create("image", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._image, max(size_mb, SMALLEST_MB[kind]) << 20)
            image = f"/proc/self/fd/{self._image}"
            command = [*MAKE[kind], image]
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=60, pass_fds=[self._image]
            )
            if done.returncode:
                raise OSError(errno.EIO, done.stderr.strip(), image)
            self._mount()
        except BaseException:
            os.close(self._image)
            raise

    def cut(self) -> None:
        """The power goes and comes back. Whoever has files open here must have been killed, or be about to go."""
        self.shut_down()
        self.remount()

    def shut_down(self) -> None:
        """The power goes: nothing reaches the device any more. Processes go on, and see errors; kill them."""
        number = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(number, _SHUTDOWN, struct.pack("i", _NO_LOG_FLUSH))
        finally:
            os.close(number)
        self.cuts += 1

    def remount(self) -> None:
        """The power comes back: the log is replayed."""
        unmount(self.path)
        self._mount()

    def _mount(self) -> None:
        device, number = _attach(self._image)
        try:
            mount(device, self.path, self.kind)
        finally:
            os.close(number)

    def close(self) -> None:
        """Unmount and detach, whatever happens. Idempotent."""
        let_go(self.path)
        image, self._image = self._image, -1
        if image >= 0:
            os.close(image)

    def __enter__(self) -> LoopFileSystem:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _attach(image: int) -> tuple[str, int]:
    """A free loop device over the file ``image``, and a descriptor that keeps it until it is mounted."""
    while True:
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        try:
            device = f"/dev/loop{fcntl.ioctl(control, _LOOP_CONTROL_GET_FREE)}"
        finally:
            os.close(control)
        number = os.open(device, os.O_RDWR | os.O_CLOEXEC)
        names = (b"image", b"", b"")
        config = _LOOP_CONFIG.pack(image, 0, *(0,) * 5, 0, 0, 0, _LOOP_AUTOCLEAR, *names, 0, 0, *(0,) * 8)
        try:
            fcntl.ioctl(number, _LOOP_CONFIGURE, config)
        except OSError as error:
            os.close(number)
            if error.errno != errno.EBUSY:  # taken by somebody else in this moment
                raise
        else:
            return device, number


@functools.cache
def reason_not_available(kind: Kind) -> str | None:
    """Why such a file system can't be had here; ``None`` if it can: it is tried, once."""
    if not hasattr(os, "memfd_create"):
        return "loop devices are a matter of Linux"
    if os.geteuid() != 0:
        return "mounting a file system needs root"
    if shutil.which(MAKE[kind][0]) is None:
        return f"{MAKE[kind][0]} is not installed"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with LoopFileSystem(kind, SMALLEST_MB[kind], folder) as made:
                if kind != "btrfs":  # whose power can't be cut: it knows no such call
                    made.cut()
        except OSError as error:
            return f"no {kind} can be made, mounted and shut down here: {error}"
    return None
