"""The configuration of a kestrel server: its TOML, the options of the server, and those of each queue.

A queue's options come from four places; what is said later wins: built in, ``[default]``, the parent of a fan-out, the
queue itself. Durations are seconds, or a string with ``ms``, ``s``, ``m``, ``h`` or ``d``; sizes are bytes, or a string
with ``k``, ``M`` or ``G``. No I/O.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from kestrelpy._value import Value
from kestrelpy.server._connection import MAX_HELD_BYTES
from kestrelpy.server.kestrel.names import is_legal, split

__all__ = ["Config", "ConfigError", "QueueConfig", "ServerConfig", "changes_at_next_start", "parse_config"]

MAX_JOURNAL_BYTES = 1 << 30
"""The largest ``default_journal_size``. Larger segments gain nothing."""
NOTHING: Mapping[Any, Any] = MappingProxyType({})
STATUSES = ("up", "writeavoid", "readonly", "quiescent")


class ConfigError(ValueError):
    """The configuration is wrong. The message has one line, and names the key."""


# -- values ------------------------------------------------------------------------------------------------------------

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES = {"k": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _duration(value: object) -> float:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*", value)
        if match is None:
            raise ConfigError(f'must be seconds, or such as "30m" (ms, s, m, h, d), not {value!r}')
        return float(match[1]) * _UNITS[match[2]]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigError(f'must be seconds, or such as "30m" (ms, s, m, h, d), not {value!r}')
    return float(value)


def _size(value: object) -> int:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+)\s*([kMG])\s*", value)
        if match is None:
            raise ConfigError(f'must be bytes, or such as "16M" (k, M, G), not {value!r}')
        return int(match[1]) * _SIZES[match[2]]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f'must be bytes, or such as "16M" (k, M, G), not {value!r}')
    return value


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"must be a whole number, not {value!r}")
    return value


def _at_least_one(value: object) -> int:
    if _count(value) == 0:
        raise ConfigError("must be at least 1")
    return _count(value)


def _line_bytes(value: object) -> int:
    """A line that were longer than what a client may send ahead would never be read to its end."""
    if _at_least_one(value) > MAX_HELD_BYTES:
        raise ConfigError(f"must be at most {MAX_HELD_BYTES}: a client may send no more ahead")
    return _count(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"must be true or false, not {value!r}")
    return value


def _name(value: object) -> bytes:
    if not isinstance(value, str) or not is_legal(value.encode()):
        raise ConfigError(f"must be the name of a queue, not {value!r}")
    return value.encode()


def _folder(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"must be a folder, not {value!r}")
    return value


def _sync(value: object) -> float | Literal["never"]:
    return "never" if value == "never" else _duration(value)


def _status(value: object) -> str:
    if value not in STATUSES:
        raise ConfigError(f"must be one of {', '.join(STATUSES)}, not {value!r}")
    return str(value)


def _addresses(value: object) -> tuple[str, ...]:
    each = [value] if isinstance(value, str) else value
    if not isinstance(each, list | tuple) or not all(isinstance(one, str) and one for one in each):
        raise ConfigError(f"must be an address or a list of addresses, not {value!r}")
    return tuple(each)


# -- options -----------------------------------------------------------------------------------------------------------


class QueueConfig(Value, kw_only=True):
    """The options of one queue. ``None``: no limit, or not used. Durations are seconds, sizes bytes."""

    max_items: int | None = None
    max_size: int | None = None
    discard_old_when_full: bool = False
    max_item_size: int | None = None
    max_age: float | None = None
    expire_to_queue: bytes | None = None
    max_expire_sweep: int | None = None
    open_transaction_timeout: float | None = None
    max_queue_age: float | None = None
    fanout_only: bool = False
    keep_journal: bool = True
    sync_journal: float | Literal["never"] = 0.1
    default_journal_size: int = 16 << 20
    max_memory_size: int = 16 << 20
    archive_dir: str | None = None
    error_to_queue: bytes | None = None
    many_errors_to_queue: bytes | None = None
    many_errors_count: int = 100

    def dump(self) -> list[tuple[str, str]]:
        """Each option and its value, as ``dump_config`` shows it."""
        return [(name, _shown(getattr(self, name))) for name in _QUEUE_OPTIONS]


class ServerConfig(Value, kw_only=True):
    """The options of the server."""

    listen: tuple[str, ...] = ("127.0.0.1:22133",)
    text: tuple[str, ...] = ()
    thrift: tuple[str, ...] = ()
    max_open_transactions: int = 1
    client_timeout: float | None = None
    expiration_timer_frequency: float = 1.0
    default_status: str = "up"
    status_change_grace_period: float = 0.0
    connection_limit_refuse_writes: int | None = None
    connection_limit_refuse_reads: int | None = None
    max_connections: int | None = None
    max_queues: int = 10_000
    max_line_bytes: int = 8192
    allow_shutdown: bool = True


_QUEUE_OPTIONS: dict[str, Callable[[object], Any]] = {
    "max_items": _count,
    "max_size": _size,
    "discard_old_when_full": _flag,
    "max_item_size": _size,
    "max_age": _duration,
    "expire_to_queue": _name,
    "max_expire_sweep": _count,
    "open_transaction_timeout": _duration,
    "max_queue_age": _duration,
    "fanout_only": _flag,
    "keep_journal": _flag,
    "sync_journal": _sync,
    "default_journal_size": _size,
    "max_memory_size": _size,
    "archive_dir": _folder,
    "error_to_queue": _name,
    "many_errors_to_queue": _name,
    "many_errors_count": _at_least_one,
}
_SERVER_OPTIONS: dict[str, Callable[[object], Any]] = {
    "listen": _addresses,
    "text": _addresses,
    "thrift": _addresses,
    "max_open_transactions": _at_least_one,
    "client_timeout": _duration,
    "expiration_timer_frequency": _duration,
    "default_status": _status,
    "status_change_grace_period": _duration,
    "connection_limit_refuse_writes": _count,
    "connection_limit_refuse_reads": _count,
    "max_connections": _at_least_one,
    "max_queues": _at_least_one,
    "max_line_bytes": _line_bytes,
    "allow_shutdown": _flag,
}
_WITHOUT_EFFECT = {
    "max_journal_size": "no journal is rewritten here",
    "min_journal_compact_delay": "no journal is rewritten here",
    "disable_aggressive_rewrites": "no journal is rewritten here",
    "enable_trace": "there are no session traces",
}
_REFUSED = {
    "zookeeper": "server sets in ZooKeeper are not supported",
    "white_list_client_id_for_enqueue": "client ids need Twitter's thrift header, which is not supported",
    "white_list_client_id_for_dequeue": "client ids need Twitter's thrift header, which is not supported",
}
_TARGETS = ("expire_to_queue", "error_to_queue", "many_errors_to_queue")
_FIXED_WHILE_OPEN = ("keep_journal", "default_journal_size", "archive_dir", "sync_journal")


def _shown(value: object) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case bytes():
            return value.decode("latin-1")
        case float():
            return f"{value:g}" if value < 1e6 else f"{value:.0f}"
        case _:
            return str(value)


def changes_at_next_start(old: QueueConfig, new: QueueConfig) -> list[str]:
    """The options that differ, and that an open queue cannot change."""
    return [name for name in _FIXED_WHILE_OPEN if getattr(old, name) != getattr(new, name)]


class Config:
    """A whole configuration. ``warnings``: what was taken, and has no effect, or another effect than it seems to.

    ``built_in``, ``default`` and ``queues`` have the options that are said for all queues, for all but those of which
    something else is said, and for single queues.
    """

    def __init__(
        self,
        server: ServerConfig | None = None,
        built_in: Mapping[str, Any] = NOTHING,
        default: Mapping[str, Any] = NOTHING,
        queues: Mapping[bytes, Mapping[str, Any]] = NOTHING,
        aliases: Mapping[bytes, tuple[bytes, ...]] = NOTHING,
    ) -> None:
        self.server = server if server is not None else ServerConfig()
        self.aliases = aliases
        self.warnings: list[str] = []
        self._built_in = built_in
        self._default = default
        self._queues = queues
        self._known: dict[bytes, QueueConfig] = {}

    def for_queue(self, name: bytes) -> QueueConfig:
        """The options of the queue of that name."""
        known = self._known.get(name)
        if known is None:
            if len(self._known) > 2 * self.server.max_queues:
                self._known.clear()
            known = self._known[name] = self._make(name)
        return known

    def _make(self, name: bytes) -> QueueConfig:
        parent, child = split(name)
        said = {**self._built_in, **self._default, **self._queues.get(parent, NOTHING)}
        if child is not None:
            said |= self._queues.get(name, NOTHING)
        said |= {key: None for key in _TARGETS if self._feeds(said.get(key), name)}  # said in [default], for others
        return QueueConfig(**said)

    def _feeds(self, target: bytes | None, name: bytes) -> bool:
        """Whether what is put into ``target`` comes into this queue: it is this one, its parent, or an alias of one."""
        if target is None:
            return False
        return target in (name, split(name)[0]) or any(self._feeds(each, name) for each in self.aliases.get(target, ()))

    def archive_dirs(self) -> set[str]:
        """All folders that queues are archived in."""
        said = [self._default, *self._queues.values()]
        return {options["archive_dir"] for options in said if options.get("archive_dir") is not None}

    def check_targets(self, where: str, name: bytes, said: Mapping[str, Any]) -> None:
        """Raise ``ConfigError`` if what this queue gives up would come back into it."""
        for key in _TARGETS:
            if self._feeds(said.get(key), name):
                raise ConfigError(f"{where} {key}: leads back to this queue")


def parse_config(
    text: str, *, overrides: Mapping[str, Any] | None = None, sync_journal: float | Literal["never"] = 0.1
) -> Config:
    """Read a configuration. ``overrides``: options of the server that win over it, such as those of the command line.

    ``sync_journal`` is the value for queues of which nothing else is said. Raises ``ConfigError``.
    """
    try:
        said = tomllib.loads(text)
    except ValueError as error:  # also a number of too many digits
        raise ConfigError(f"no TOML: {error}") from None
    except RecursionError:
        raise ConfigError("no TOML: tables and lists are nested too deep") from None
    warnings: list[str] = []
    tables = {key: said.pop(key, {}) for key in ("default", "queues", "aliases")}
    for key, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"[{key}]: must be a table")
    told = {key: value for key, value in (overrides or {}).items() if value is not None}
    server = ServerConfig(
        **{**_read("", said, _SERVER_OPTIONS, warnings), **_read("", told, _SERVER_OPTIONS, warnings)}
    )
    if not (server.listen or server.text or server.thrift):
        raise ConfigError("listen: there is no address to listen at")
    default = _read("[default] ", tables["default"], _QUEUE_OPTIONS, warnings)
    queues = {}
    for name, table in tables["queues"].items():
        where = f"[queues.{name}]"
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: must be a table")
        if not is_legal(name.encode()):
            raise ConfigError(f"{where}: no queue can have this name")
        queues[name.encode()] = _read(f"{where} ", table, _QUEUE_OPTIONS, warnings)
    aliases = _read_aliases(tables["aliases"])
    built_in = _read("", {"sync_journal": sync_journal}, _QUEUE_OPTIONS, warnings)
    config = Config(server, built_in, default, queues, aliases)
    _check_limits("[default]", QueueConfig(**default))
    for name, options in queues.items():
        config.check_targets(f"[queues.{name.decode()}]", name, options)
        _check_limits(f"[queues.{name.decode()}]", config.for_queue(name))
    warnings += [f"the alias {name.decode()} hides the queue of that name" for name in aliases if name in queues]
    config.warnings = warnings
    return config


def _read(
    where: str, table: Mapping[str, Any], options: Mapping[str, Callable[[object], Any]], warnings: list[str]
) -> dict[str, Any]:
    read = {}
    for key, value in table.items():
        if key in _REFUSED:
            raise ConfigError(f"{where}{key}: {_REFUSED[key]}")
        if key in _WITHOUT_EFFECT and options is _QUEUE_OPTIONS:
            warnings.append(f"{where}{key} has no effect: {_WITHOUT_EFFECT[key]}")
            continue
        if key not in options:
            raise ConfigError(f"{where}{key}: there is no such key")
        try:
            read[key] = options[key](value)
        except ConfigError as error:
            raise ConfigError(f"{where}{key}: {error}") from None
    return read


def _check_limits(where: str, config: QueueConfig) -> None:
    if config.discard_old_when_full and config.max_items == 0:
        raise ConfigError(f"{where} max_items: with discard_old_when_full, it must be at least 1")
    if not 1 << 16 <= config.default_journal_size <= MAX_JOURNAL_BYTES:
        raise ConfigError(f"{where} default_journal_size: must be from 64k to 1G")


def _read_aliases(table: Mapping[str, Any]) -> dict[bytes, tuple[bytes, ...]]:
    aliases = {}
    for name, value in table.items():
        where = f"[aliases] {name}"
        if not is_legal(name.encode()):
            raise ConfigError(f"{where}: no queue can have this name")
        targets = [value] if isinstance(value, str) else value
        if not isinstance(targets, list) or not targets:
            raise ConfigError(f"{where}: must be a list of queues, not {value!r}")
        try:
            aliases[name.encode()] = tuple(_name(target) for target in targets)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    _check_circles(aliases)
    return aliases


def _check_circles(aliases: Mapping[bytes, tuple[bytes, ...]]) -> None:
    """Raise ``ConfigError`` if an alias leads back to itself (KS-B9)."""
    ends: set[bytes] = set()

    def follow(name: bytes, path: tuple[bytes, ...]) -> None:
        if name in path:
            raise ConfigError(f"[aliases] {name.decode()}: leads back to itself")
        if name in ends:
            return
        for target in aliases.get(name, ()):
            follow(target, (*path, name))
        ends.add(name)

    try:
        for name in aliases:
            follow(name, ())
    except RecursionError:
        raise ConfigError("[aliases]: the chain of aliases is too long") from None
