"""From a URL to a store."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from kestrelpy.ship.errors import BadStoreURL
from kestrelpy.ship.folder_store import FolderStore
from kestrelpy.ship.object_store import ObjectStore, open_object_store
from kestrelpy.ship.store import Store

__all__ = ["open_store"]

BUCKETS = ("s3", "gs", "az", "abfss")
"""The schemes of object stores."""
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def open_store(
    store: str | Store | Any, *, options: Mapping[str, Any] | None = None, request_timeout: float = 10.0
) -> Store:
    """Open a store of objects.

    ``store``: a URL (``file:///folder``, ``s3://bucket/prefix``, ``gs://``, ``az://``, ``abfss://``), a ``Store``, or a
    store object of ``obstore``. ``options`` are what ``obstore.store.from_url`` takes for that kind of store; what is
    not given there comes from its environment variables. ``request_timeout``: seconds for one request, its repetitions
    included. Nothing is asked of the store yet.

    Raises ``BadStoreURL``, and ``ForkedQueue`` in a child of a process that has opened a store that is no folder.
    """
    if isinstance(store, str):
        return _of_url(store, dict(options or {}), request_timeout)
    if options:
        raise BadStoreURL(type(store).__name__, "'options' go with a URL; this is a store already")
    if isinstance(store, Store) and not type(store).__module__.startswith("obstore"):
        return store
    if type(store).__module__.partition(".")[0] in ("obstore", "pyo3_object_store"):
        return ObjectStore(store, type(store).__name__)
    raise BadStoreURL(type(store).__name__, "'store' must be a URL, a Store, or a store object of obstore")


def url_of(given: str | Store | Any, opened: Store) -> str:
    """How ``jobs.ship`` names a store that was ``given`` as this: by its URL, or else as it describes itself."""
    return given.rstrip("/") if isinstance(given, str) else opened.describe()


def _of_url(url: str, options: dict[str, Any], request_timeout: float) -> Store:
    shown = masked(url)
    try:
        parts = urlsplit(url)
        user, host = parts.username, parts.hostname
    except ValueError:
        raise BadStoreURL(shown, "it is no URL") from None
    if parts.scheme not in (*BUCKETS, "file"):
        raise BadStoreURL(shown, f"its scheme must be one of {', '.join(BUCKETS)} and file, as in file:///folder")
    if "?" in url or "#" in url:
        raise BadStoreURL(shown, "a URL with a query or a fragment is refused: pass 'options', or set the environment")
    if (user is not None and parts.scheme != "abfss") or parts.password is not None:
        raise BadStoreURL(shown, "a URL with a user part is refused: credentials come from the environment")
    if ".." in parts.path.split("/"):
        raise BadStoreURL(shown, "'..' in a URL is refused")
    if parts.scheme == "file":
        if host not in (None, "", "localhost") or not parts.path.startswith("/"):
            raise BadStoreURL(shown, "a folder is file:// and an absolute path, as in file:///folder")
        if options:
            raise BadStoreURL(shown, f"a folder has no options ({', '.join(sorted(options))})")
        return FolderStore(parts.path)
    if not host or not _HOST.fullmatch(host) or (parts.scheme == "abfss" and not user):
        raise BadStoreURL(shown, "it names no bucket")
    return open_object_store(url.rstrip("/"), options, request_timeout)


def masked(url: str) -> str:
    """What of a URL may be shown: no user part (but the container of ``abfss``), no query, no fragment."""
    scheme, separator, rest = re.split(r"[?#]", url, maxsplit=1)[0].partition("://")
    if not separator:
        return "***"
    host, slash, path = rest.partition("/")
    user, at, host = host.rpartition("@")
    if at and (scheme != "abfss" or ":" in user):
        user = "***"
    return f"{scheme}://{user}{at}{host}{slash}{path}"
