"""``Gate``: closed while a queue must accept no puts, for a reason that is no reader's."""

from __future__ import annotations

from kestrelpy.config import FullPolicy, ReaderConfig

_CONFIGS = {policy: ReaderConfig(full_policy=policy) for policy in (FullPolicy.REFUSE, FullPolicy.BLOCK)}


class Gate:
    """Stands in for a reader that refuses every put. ``waits``: whether puts wait for it, as for room. ``reason``: for
    the error of a put that does not wait (any longer).
    """

    items = bytes = 0

    def __init__(self, queue: str, reason: str, *, waits: bool) -> None:
        self.name = self.full_name = queue
        self.reason = reason
        self.config = _CONFIGS[FullPolicy.BLOCK if waits else FullPolicy.REFUSE]

    def counted(self) -> tuple[int, int]:
        return 0, 0
