"""Where the project is."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parent.parent
ROOT = TESTS.parent
QUICK_START = TESTS / "support" / "quick_start"
"""What makes a Python start quickly that a test starts."""
PYTHONPATH = os.pathsep.join([str(ROOT), str(QUICK_START)])
"""For such a Python, where it does not have it from ``conftest.py``."""
