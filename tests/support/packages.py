"""Packages that the codecs need. The extra [dev] has them; without them, tests say so and are skipped."""

from __future__ import annotations

import sys

import pytest

ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"


def need_codecs() -> None:
    """Skip the module that calls this, unless the packages of all codecs are installed."""
    for package in ("msgspec", "pydantic", "cryptography", ZSTD):
        pytest.importorskip(package, reason=f"{package} is not installed: the extra [dev] has it")
