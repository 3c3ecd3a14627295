"""What a documented program prints is what its comments say.

In a block of a page, ``print(...)  # words`` on one line says that it prints these words; ``...`` in them is anything.
``checked`` makes such a line compare. A page that shows no output has no such comment.
"""

from __future__ import annotations

import re

LINE = re.compile(r"^(\s*)print\((.*)\)  # (.+)$")
IMPORT = "from tests.support.shown import shown as _shown"


def checked(program: str) -> str:
    """The program of a page, on the same lines, with its prints compared. Its first line is empty: it is a heading."""
    lines = [LINE.sub(lambda at: f"{at[1]}_shown({at[3]!r}, {at[2]})", line) for line in program.split("\n")]
    assert lines[0] == "", "a page begins with its heading"
    return "\n".join([IMPORT, *lines[1:]])


def shown(says: str, *things: object) -> None:
    """Print, and compare with what the page says."""
    printed = " ".join(str(each) for each in things)
    print(printed)
    pattern = ".*".join(re.escape(part) for part in says.split("..."))
    assert re.fullmatch(pattern, printed), f"the page says {says!r}, and {printed!r} is printed"
