"""Small files beside a journal: read as a whole, with a bound; and signs, of which only the name counts."""

from __future__ import annotations

import contextlib

from kestrelpy._disk.interface import Directory


def read_small(folder: Directory, name: str, most_bytes: int) -> bytes | None:
    """The content of a file; ``None`` if it is not there. Of a file with more than ``most_bytes``, one byte more than
    that: too many for any format. Raises ``OSError``.
    """
    try:
        file = folder.open(name)
    except FileNotFoundError:
        return None
    try:
        return file.read(0, min(file.size(), most_bytes + 1))
    finally:
        file.close()


def make_sign(folder: Directory, name: str, text: bytes) -> None:
    """Make a file of which only the name counts, which is on disk when this returns. ``text`` is for people. Raises
    ``FileExistsError``, and ``OSError``.
    """
    file = folder.create(name)
    try:
        with contextlib.suppress(OSError):  # no room for the text
            file.write(0, text)
            file.sync()
    finally:
        file.close()
    folder.sync()
