"""Shared by the commands of ``kestrelpy.ship``: the options of a store, their errors, and progress on a terminal.

A secret does not belong on a command line, where every user of the machine can read it in the list of processes. So an
option whose name looks like one is refused, and no option's value is ever shown.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from kestrelpy.cli._common import CommandError, binary_size
from kestrelpy.demo.progress import ProgressLine

__all__ = ["StoreProgress", "add_store_options", "store_errors", "store_option", "store_options"]

_SECRETS = re.compile("key|secret|token|password|passwd|signature|credential|authorization|sas", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*(\.[A-Za-z][A-Za-z0-9_-]*)?")
_WORDS = {"true": True, "false": False}
_CLIENT = "client_options"
_CONNECTION = {
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "default_content_type",
    "http1_only",
    "http2_keep_alive_interval",
    "http2_keep_alive_timeout",
    "http2_keep_alive_while_idle",
    "http2_only",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "randomize_addresses",
    "read_timeout",
    "root_certificate",
    "timeout",
    "user_agent",
}
"""Options of obstore's ``ClientConfig``. Among those of the store, obstore 0.12 ends in a panic, with pages of text."""


def store_option(text: str) -> tuple[str, str]:
    """``name=value``, the type of an argument. Messages have the name at most: the value may be a secret."""
    name, equals, value = text.partition("=")
    if not equals or not _NAME.fullmatch(name):
        raise argparse.ArgumentTypeError("must be name=value, such as region=eu-west-1")
    if _SECRETS.search(name):
        raise argparse.ArgumentTypeError(
            f"{name} looks like a secret, which all users of this machine could read: set the store's environment "
            "variable for it (AWS_SECRET_ACCESS_KEY and so on)"
        )
    if re.search(r"://[^/]*@", value):
        raise argparse.ArgumentTypeError(f"{name} has a user part: credentials come from the environment")
    return name, value


def add_store_options(parser: Any, flag: str = "--option") -> None:
    """Add the option that names an option of the store."""
    parser.add_argument(
        flag,
        metavar="NAME=VALUE",
        action="append",
        default=[],
        type=store_option,
        help="an option of the store, such as region=eu-west-1 or allow_http=true; may be repeated; "
        "secrets come from the environment",
    )


def store_options(given: Sequence[tuple[str, str]]) -> dict[str, Any] | None:
    """What ``open_store`` takes. Options of the connection are put among those of the client, where they belong;
    ``client_options.name`` is one of these, too, if it is not known here.
    """
    options: dict[str, Any] = {}
    for name, value in given:
        group, dot, inner = (_CLIENT, ".", name) if name in _CONNECTION else name.partition(".")
        if dot:
            options.setdefault(group, {})[inner] = _WORDS.get(value, value)
        else:
            options[name] = value
    return options or None


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """A URL or an option that can't be used is wrong use."""
    from kestrelpy.ship import BadStoreURL

    try:
        yield
    except BadStoreURL as error:
        raise CommandError(str(error), status=2) from None


class StoreProgress:
    """A bar on standard error while bytes are moved, if it is a terminal. Use as a context manager."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._line = ProgressLine(sys.stderr) if sys.stderr is not None and sys.stderr.isatty() else None

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if self._line is not None:
            done = min(1.0, done_bytes / total_bytes) if total_bytes else 1.0
            self._line.show(done, f"{self._verb} {binary_size(done_bytes)} of {binary_size(total_bytes)}")

    def __enter__(self) -> StoreProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._line is not None:
            self._line.clear()
