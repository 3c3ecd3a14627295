"""A store on S3, Google's or Azure's storage, or what speaks like them, through ``obstore``.

``obstore`` is imported on use. Whatever its errors say is cut down to the kind of error, the server's status and the
server's code: the rest may have signatures, access keys and option values in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from os import getpid
from typing import Any, TypeVar

from kestrelpy.errors import ForkedQueue
from kestrelpy.ship.errors import BadStoreURL, StoreUnavailable
from kestrelpy.ship.store import Listed, Listing

T = TypeVar("T")
_MOST_RETRIES = 2
_STATUS = re.compile(r"status code: (\d{3})\b|\bstatus: (\d{3})\b")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,60})</Code>")
_PHRASES = {
    "timed out": "no answer in time",
    "refused": "connection refused",
    "dns error": "the host's name is unknown",
    "error sending request": "no connection",
    "source: badscheme": "an endpoint without TLS needs client_options={'allow_http': True}",
}
"""What an error without a status says of the connection."""

_used_in: int | None = None
"""The process that has made the first ``ObjectStore``; a child forked by it must make none (its runtime has no threads
there, and waits for ever)."""


class ObjectStore:
    """A ``Store`` over a store object of ``obstore``. It cannot be pickled: that object may hold secrets."""

    def __init__(self, inner: Any, name: str) -> None:
        global _used_in
        _check_process(_used_in)
        _used_in = self._process = getpid()
        self._inner = inner
        self._name = name

    def __repr__(self) -> str:
        return f"ObjectStore({self._name!r})"

    def __reduce__(self) -> str:
        raise TypeError("an ObjectStore is not pickled, as it may hold secrets: open it from its URL where it is used")

    def describe(self) -> str:
        return self._name

    def create(self, key: str, data: bytes) -> bool:
        import obstore

        def put() -> bool:
            try:
                obstore.put(self._inner, key, data, mode="create", use_multipart=False)
            except obstore.exceptions.AlreadyExistsError:
                return False
            return True

        return self._ask(key, put)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes | None:
        import obstore

        def get() -> bytes | None:
            try:
                if start or length is not None:
                    return self._range(key, start, length)
                return obstore.get(self._inner, key).bytes().to_bytes()
            except FileNotFoundError:
                return None

        return self._ask(key, get)

    def _range(self, key: str, start: int, length: int | None) -> bytes:
        """A part of an object. Stores refuse a range that is empty or begins at the end: then the size is asked for."""
        import obstore

        if length != 0:
            wanted: Any = {"offset": start} if length is None else (start, start + length)
            try:
                return obstore.get(self._inner, key, options={"range": wanted}).bytes().to_bytes()
            except FileNotFoundError:
                raise
            except Exception as error:
                if not _may_be_the_range(error) or start < obstore.head(self._inner, key)["size"]:
                    raise
        else:
            obstore.head(self._inner, key)
        return b""

    def list(self, prefix: str) -> Listing:
        import obstore

        def look() -> Listing:
            chunks = obstore.list(self._inner, prefix.rstrip("/") or None)
            return sorted(
                Listed(each["path"], each["size"], int(each["last_modified"].timestamp() * 1000))
                for chunk in chunks
                for each in chunk
            )

        return self._ask(prefix, look)

    def delete(self, keys: Iterable[str]) -> None:
        import obstore

        def remove(wanted: list[str]) -> None:
            try:
                obstore.delete(self._inner, wanted)
            except FileNotFoundError:
                for key in wanted if len(wanted) > 1 else ():
                    remove([key])

        every = list(keys)
        if every:
            self._ask(every[0], lambda: remove(every))

    def _ask(self, key: str, request: Callable[[], T]) -> T:
        """Do a request. What is raised has no cause: the text of the client's error may have secrets in it."""
        _check_process(self._process)
        try:
            return request()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of its runtime is no Exception
            reason = reason_of(error)
        raise StoreUnavailable(self._name, key, reason)


def _check_process(process: int | None) -> None:
    if process is not None and process != getpid():
        raise ForkedQueue(process)


def _may_be_the_range(error: Exception) -> bool:
    """Whether the store may have refused the range, rather than the request."""
    status = _STATUS.search(str(error))
    if status is not None:
        return "416" in status.groups()
    return not any(phrase in str(error).lower() for phrase in _PHRASES)


def reason_of(error: BaseException) -> str:
    """What may be shown of an error of the client: its kind, and the server's status and code."""
    text, kind = str(error), type(error).__name__
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is not None:
        return " ".join([kind, status[1] or status[2], *([code[1]] if code else [])])
    lower = text.lower()
    return next((f"{kind}: {said}" for phrase, said in _PHRASES.items() if phrase in lower), kind)


def open_object_store(url: str, options: dict[str, Any], request_timeout: float) -> ObjectStore:
    """Open what ``url`` names. Raises ``BadStoreURL``, also for options that ``obstore`` does not know."""
    from datetime import timedelta

    try:
        from obstore.store import from_url
    except ImportError:
        raise BadStoreURL(url, "stores of this kind need the extra: pip install 'kestrelpy[ship]'") from None
    _check_process(_used_in)
    limit = timedelta(seconds=request_timeout)
    client = {"timeout": limit, "connect_timeout": limit, **options.pop("client_options", {})}
    retries = {"max_retries": _MOST_RETRIES, "retry_timeout": limit, **options.pop("retry_config", {})}
    try:
        inner: Any = from_url(url, client_options=client, retry_config=retries, **options)  # type: ignore[call-overload]
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of its runtime is no Exception
        kind = type(error).__name__
    else:
        return ObjectStore(inner, url)
    told = ", ".join(sorted(options)) or "none"
    hint = "those of the connection, as allow_http, belong into client_options"
    raise BadStoreURL(url, f"it can't be opened ({kind}) with the options {told}; {hint}")
