"""The parts of a work queue that its core calls, as the core sees them."""

from __future__ import annotations

from typing import Any, Protocol


class Compaction(Protocol):
    """The part of ``Compactor`` that a core uses."""

    is_armed: bool
    """Whether a compaction is scheduled."""
    migrated: int

    def arm(self, seconds: float) -> None:
        """Compact the journal in ``seconds``, unless a compaction is scheduled already."""

    def grown_locked(self) -> None:
        """The journal has grown since the last call: schedule a compaction."""

    def forget_totals(self) -> None:
        """The totals in the journal may be wrong: write them again."""

    def abandon(self) -> None: ...


class BodyLimits(Protocol):
    """The part of ``JobIntake`` that a change of a body uses."""

    def retry_delay(self, attempts: int) -> float:
        """Seconds until a job is ready again that was released without a delay."""

    def checked_body(self, body: Any) -> bytes:
        """The body as bytes. Raises ``JobTooBig``, ``TypeError``, and what the codec raises."""

    def decode(self, body: bytes) -> Any:
        """``Job.value``. Raises what the codec raises."""

    def check_growth_locked(self, size: int) -> None:
        """Whether the bodies may take ``size`` bytes more. Raises ``QueueFull``."""
