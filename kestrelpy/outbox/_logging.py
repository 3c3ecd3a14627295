"""``log``: the logger ``kestrelpy.outbox``, for threads that nothing may end.

An error that a filter or a handler of the user's raises goes no further.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

__all__ = ["log"]

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class _QuietLog(_Adapter):
    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the record is of the caller, not of this line
        with contextlib.suppress(Exception, SystemExit):
            super().log(level, msg, *args, **kwargs)


log = _QuietLog(logging.getLogger("kestrelpy.outbox"), {})
