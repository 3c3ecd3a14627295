"""``Gate``: closed while a queue must accept no puts, for a reason that is no reader's."""

from __future__ import annotations

from collections.abc import Callable

from kestrelpy.config import FullPolicy, ReaderConfig
from kestrelpy.errors import KestrelError

_CONFIGS = {policy: ReaderConfig(full_policy=policy) for policy in (FullPolicy.REFUSE, FullPolicy.BLOCK)}


class Gate:
    """Stands in for a reader that refuses every put. ``waits``: whether puts wait for it, as for room;
    ``waits_if_told``: puts that say for how long do in any case. ``error``: makes the error of a put that does not wait
    (any longer).
    """

    items = bytes = 0

    def __init__(
        self, queue: str, error: Callable[[], KestrelError], *, waits: bool, waits_if_told: bool = False
    ) -> None:
        self.name = self.full_name = queue
        self.error = error
        self.waits = waits
        self.waits_if_told = waits_if_told
        self.config = _CONFIGS[FullPolicy.BLOCK if waits else FullPolicy.REFUSE]

    def counted(self) -> tuple[int, int]:
        return 0, 0
