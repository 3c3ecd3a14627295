"""``log``: the logger ``kestrelpy.outbox``, for threads that nothing may end.

An error that a filter or a handler of the user's raises goes no further.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

__all__ = ["brief", "log"]

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


def brief(error: BaseException | None) -> str:
    """What a driver says, in one line. SQLAlchemy's own text has the statement, too, and its values: these are the
    user's, and no business of a log.
    """
    text = str(getattr(error, "orig", None) or error).strip()
    return text.partition("\n")[0] or type(error).__name__
