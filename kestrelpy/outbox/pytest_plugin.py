"""For pytest: the fixture ``virtual_outbox``. Importing this module imports neither the test kit nor SQLAlchemy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from kestrelpy.outbox.outbox import Outbox
    from kestrelpy.outbox.testing import VirtualOutbox

__all__ = ["VirtualOutboxes", "virtual_outbox"]


class VirtualOutboxes(Protocol):
    """The type of the fixture, for annotations: ``def test_mails(virtual_outbox: VirtualOutboxes) -> None``."""

    def __call__(self, outbox: Outbox, bind: Any = None, *, now_ms: int = 0) -> VirtualOutbox: ...


@pytest.fixture
def virtual_outbox() -> Iterator[VirtualOutboxes]:
    """``virtual_outbox(outbox)``: ``kestrelpy.outbox.testing.virtual`` until the end of the test."""
    with contextlib.ExitStack() as stack:

        def enter(outbox: Outbox, bind: Any = None, *, now_ms: int = 0) -> VirtualOutbox:
            from kestrelpy.outbox.testing import virtual

            return stack.enter_context(virtual(outbox, bind, now_ms=now_ms))

        yield enter
