"""Stores of ``kestrelpy.ship`` as Spark's options name them.

Rules:
1. What goes into a plan or to an executor has no secret: a place is a URL and three options. Driver and executors find
   credentials by themselves, each in its environment, and open the store where they use it.
2. Spark makes a ``file:`` URI of every path, so the scheme does not tell a folder of queues from a store in a folder.
   What is in the folder does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kestrelpy._journal import file_names
from kestrelpy.ship.identity import IDENTITY_KEY
from kestrelpy.ship.opening import BUCKETS, open_store
from kestrelpy.ship.store import Store
from kestrelpy.spark.locations import local_folder
from kestrelpy.spark.read.pushdown import truth

STORE_OPTIONS = ("storeEndpoint", "storeRegion", "storeAllowHttp")
_SECRET = re.compile("key|token|secret|password|signature", re.IGNORECASE)
_OF_BUCKET = re.compile(rf"({'|'.join(BUCKETS)})://.*", re.IGNORECASE | re.DOTALL)
_WITH_SECRET = re.compile("[@?#]")
_FROM_ENVIRONMENT = (
    "options are seen in plans, and credentials are not among them: the driver and each executor take them from their "
    "environment (AWS_ACCESS_KEY_ID and so on), from profiles or from the role of their machine"
)


class StorePlace(NamedTuple):
    """A store: its URL, and what else a connection to it needs, without secrets."""

    url: str
    endpoint: str | None = None
    region: str | None = None
    allow_http: bool | None = None

    def open(self) -> Store:
        """Open the store, in the process that uses it. Raises ``BadStoreURL``, ``ForkedQueue``."""
        options: dict[str, Any] = {}
        if self.endpoint is not None:
            options["endpoint"] = self.endpoint
        if self.region is not None:
            options["region"] = self.region
        if self.allow_http is not None:
            options["client_options"] = {"allow_http": self.allow_http}
        return open_store(self.url, options=options)


def store_of(options: Mapping[str, str]) -> StorePlace | None:
    """The store that the options name; ``None`` if it is no store, but perhaps a folder of queues.

    Raises ``ValueError``: for an option that looks like a secret, for ``archive`` beside a store, for a folder that is
    both without an option ``queue``.
    """
    refuse_secrets(options)
    path = options.get("path")
    if not path:
        return None
    if _OF_BUCKET.fullmatch(path):
        scheme, colon, rest = path.partition(":")
        url = scheme.lower() + colon + rest
    else:
        folder = local_folder(path)
        if not _is_store(folder, options.get("queue")):
            return None
        url = f"file://{folder}"
    if options.get("archive"):
        raise ValueError("the option archive goes with a folder of queues: a store has all segments that it keeps")
    endpoint = options.get("storeEndpoint")
    if endpoint is not None and _WITH_SECRET.search(endpoint):
        raise ValueError(
            f"the option storeEndpoint is a URL without a user, a query and a fragment: {_FROM_ENVIRONMENT}"
        )
    allow_http = truth(options, "storeAllowHttp", default=False) if "storeAllowHttp" in options else None
    return StorePlace(url, endpoint, options.get("storeRegion"), allow_http)


def refuse_secrets(names: Iterable[str]) -> None:
    """Raise ``ValueError`` for the name of an option that looks like that of a secret."""
    for name in names:
        if _SECRET.search(name):
            raise ValueError(f"the option {name!r} looks like a secret: {_FROM_ENVIRONMENT}")


def _is_store(folder: str, queue: str | None) -> bool:
    """Whether the folder is a store: has it ``queue``, or any queue?"""
    if queue is not None:
        return _has_identity(folder, queue)
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    if not any(_has_identity(folder, name) for name in names):
        return False
    if any(file_names.parse_owner(name) is not None for name in names):
        raise ValueError(f"{folder} is a store and a folder of queues: name one of its queues by the option queue")
    return True


def is_store_alone(folder: str) -> bool:
    """Whether a folder is a store of shipped queues, and no folder of queues."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    is_store = any(_has_identity(folder, name) for name in names)
    return is_store and all(file_names.parse_owner(name) is None for name in names)


def _has_identity(folder: str, name: str) -> bool:
    return file_names.is_name(name) and os.path.isfile(f"{folder}/{name}/{IDENTITY_KEY}")
