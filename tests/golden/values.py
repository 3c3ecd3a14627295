"""What the codecs have written, to be read for ever: ``python -m tests.golden.values`` makes what is missing.

A file that is there is never made again. Its name is that of a case; what it decodes to is the case's value.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from pathlib import Path
from typing import Any

from kestrelpy import codecs
from kestrelpy.config import Codec
from kestrelpy.logging.records import decode_record, encode_record

HERE = Path(__file__).parent / "values"
KEY = bytes(range(32))


@dataclasses.dataclass
class Order:
    """What is ordered, how much of it, and for what price."""

    article: str
    count: int
    price: float | None


VALUE = Order("h\u00e4\u00dflich", -3, 0.5)
TEXT = "apples " * 40


class Records:
    """Log records, as their attributes: a record is equal to itself only."""

    def encode(self, value: dict[str, Any]) -> bytes:
        return encode_record(logging.makeLogRecord(value))

    def decode(self, data: bytes) -> dict[str, Any]:
        return vars(decode_record(data))


RECORD = {
    "name": "shop.till",
    "msg": "sold 3 h\u00e4\u00dfliche",
    "message": "sold 3 h\u00e4\u00dfliche",
    "args": None,
    "levelno": 30,
    "levelname": "WARNING",
    "created": 1700000000.125,
    "msecs": 125,
    "relativeCreated": 1.5,
    "pathname": "/srv/shop/till.py",
    "filename": "till.py",
    "module": "till",
    "lineno": 7,
    "funcName": "sell",
    "process": 4711,
    "processName": "MainProcess",
    "thread": 140000000000000,
    "threadName": "MainThread",
    "taskName": "Task-1",
    "exc_info": None,
    "exc_text": "Traceback (most recent call last):\nLookupError: x",
    "stack_info": "Stack (most recent call last):\n  sell()",
    "user": {"id": 7, "tags": ["a", None]},
}


def cases() -> dict[str, tuple[Codec[Any], Any]]:
    """Each case's codec and value."""
    return {
        "json": (codecs.JSON, {"article": "h\u00e4\u00dflich", "count": [1, None, True]}),
        "utf8": (codecs.UTF8, TEXT),
        "msgspec-json": (codecs.msgspec(Order), VALUE),
        "msgspec-msgpack": (codecs.msgspec(Order, "msgpack"), VALUE),
        "pydantic": (codecs.pydantic(Order), VALUE),
        "zstd": (codecs.zstd(codecs.UTF8), TEXT),
        "log-record": (Records(), RECORD),
        "encrypted": (codecs.encrypted({"2026": KEY}, codecs.UTF8), TEXT),
        "encrypted-zstd-128": (codecs.encrypted({"k": KEY[:16], "2026": KEY}, codecs.zstd(codecs.UTF8)), TEXT),
    }


def main() -> int:
    HERE.mkdir(exist_ok=True)
    made = 0
    for name, (codec, value) in cases().items():
        if not (HERE / name).exists():
            (HERE / name).write_bytes(codec.encode(value))
            made += 1
    print(f"{made} files made; those that were there are never made again", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
