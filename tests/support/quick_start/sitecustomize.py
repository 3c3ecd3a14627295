"""For each Python that a test starts: ``conftest.py`` puts this folder into ``PYTHONPATH``.

Where redis is installed, as it is for the benchmarks, ``import portalocker`` imports it and what it imports, for a lock
that nothing here uses. That is 0.14 s, and more than all else that a program with a queue imports.
"""

from __future__ import annotations

import sys

sys.modules["portalocker.redis"] = None  # type: ignore[assignment]  # as if redis were not installed
