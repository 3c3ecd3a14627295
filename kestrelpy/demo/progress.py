"""The progress display of the demos: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO

_STEPS = 10  # the total number of plain lines


class ProgressLine:
    """Shows how far the work is. ``say`` writes a line that stays."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._step = 1
        self._shown = ""

    def show(self, fraction: float, text: str) -> None:
        """Show the fraction of the work that is done (0 to 1), and a text about it."""
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            bar_width = 16
            full = int(bar_width * fraction)
            line = f"[{'#' * full}{'.' * (bar_width - full)}] {fraction:4.0%}  {text}"[:width]
            if line != self._shown:
                self._stream.write("\r" + line.ljust(len(self._shown)))
                self._shown = line
        elif fraction * _STEPS >= self._step:
            self._stream.write(f"{fraction:4.0%}  {text}\n")
            self._step = int(fraction * _STEPS) + 1
        self._stream.flush()

    def say(self, text: str) -> None:
        """Write a line above the bar."""
        self.clear()
        self._stream.write(text + "\n")
        self._stream.flush()

    def clear(self) -> None:
        """Remove the bar."""
        if self._shown:
            self._stream.write("\r" + " " * len(self._shown) + "\r")
            self._shown = ""
