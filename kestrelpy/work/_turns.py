"""The frame of nearly every call of a work queue: ``with news, lock, turn as now``.

The lock is a ``with`` of its own: no interrupt falls between its being taken and the duty to let it go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from kestrelpy.work._keeping import Keeping


class Turn:
    """With the lock: time does its work first, and what is due next is seen to at the end."""

    def __init__(self, keeping: Keeping) -> None:
        self._keeping = keeping

    def __enter__(self) -> float:
        try:
            return self._keeping._begin_locked()
        except BaseException as error:
            self._keeping._note(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        keeping = self._keeping
        try:
            if error is not None:
                keeping._note(error)
            keeping._end_locked()
        except BaseException as another:
            keeping._note(another)
            raise


class News:
    """Those who have left the line are told, behind the lock."""

    def __init__(self, keeping: Keeping) -> None:
        self._keeping = keeping

    def __enter__(self) -> None:
        """Nothing to be done before."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._keeping._machine.told:
            self._keeping._tell()
