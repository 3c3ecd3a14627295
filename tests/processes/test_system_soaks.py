"""The long runs can be started and come to their end."""

from __future__ import annotations

import pytest

from tests.processes.system_soaks import FOR_ROOT, SOAKS, reason_not_available, soak


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.root if name in FOR_ROOT else ()) for name in SOAKS]
)
def test_a_moment_of_each(name: str) -> None:
    reason = reason_not_available(name)
    if reason is not None:
        pytest.skip(reason)
    moments = (0.1, 1, 10)  # on a machine that has other things to do, one may pass with nothing done
    assert any(soak(name, 1, seconds=moment).total() for moment in moments)
