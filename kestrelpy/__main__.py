# PYTHON_ARGCOMPLETE_OK
"""``python -m kestrelpy``: the command line."""

from __future__ import annotations

import sys

from kestrelpy.cli import main

if __name__ == "__main__":
    sys.exit(main())
