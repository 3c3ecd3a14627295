"""Refuses the systems on which nothing of this library would keep its promises, when it is imported."""

from __future__ import annotations

import sys

__all__: list[str] = []

if sys.platform == "win32":
    raise ImportError(
        "kestrelpy runs on Linux and macOS, and not on Windows, which has no dir_fd and no rename of an open file: "
        "use it inside WSL 2"
    )
