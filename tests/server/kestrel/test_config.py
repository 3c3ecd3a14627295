"""The configuration of the kestrel server: every key, where it counts, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from kestrelpy.server import KestrelServer
from kestrelpy.server.kestrel.config import ConfigError, QueueConfig, changes_at_next_start, parse_config


def queue(line: str) -> QueueConfig:
    return parse_config(f"[queues.q]\n{line}").for_queue(b"q")


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("max_items = 1500000", 1_500_000),
        ('max_size = "1G"', 1 << 30),
        ("max_size = 5", 5),
        ("discard_old_when_full = true", True),
        ('max_item_size = "16k"', 16 << 10),
        ('max_age = "30m"', 1800.0),
        ("max_age = 1.5", 1.5),
        ('max_age = "250ms"', 0.25),
        ('max_age = "2d"', 172_800.0),
        ('max_age = "1.5h"', 5400.0),
        ('expire_to_queue = "late+audit"', b"late+audit"),
        ("max_expire_sweep = 100", 100),
        ('open_transaction_timeout = "1m"', 60.0),
        ('max_queue_age = "1d"', 86_400.0),
        ("fanout_only = true", True),
        ("keep_journal = false", False),
        ("sync_journal = 0", 0.0),
        ('sync_journal = "never"', "never"),
        ('sync_journal = "20ms"', 0.02),
        ('default_journal_size = "1M"', 1 << 20),
        ('max_memory_size = "128M"', 128 << 20),
        ('archive_dir = "old"', "old"),
        ('error_to_queue = "bad"', b"bad"),
        ('many_errors_to_queue = "worse"', b"worse"),
        ("many_errors_count = 3", 3),
    ],
)
def test_queue_keys(line: str, value: object) -> None:
    """KP-1.11, KP-1.12: every queue key."""
    assert getattr(queue(line), line.split(" ", 1)[0]) == value


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('listen = ["127.0.0.1:1", "unix:/x"]', ("127.0.0.1:1", "unix:/x")),
        ('text = "127.0.0.1:2222"', ("127.0.0.1:2222",)),
        ('thrift = "127.0.0.1:2229"', ("127.0.0.1:2229",)),
        ("max_open_transactions = 100", 100),
        ('client_timeout = "10s"', 10.0),
        ("expiration_timer_frequency = 0", 0.0),
        ('default_status = "quiescent"', "quiescent"),
        ("status_change_grace_period = 5", 5.0),
        ("connection_limit_refuse_writes = 10", 10),
        ("connection_limit_refuse_reads = 11", 11),
        ("max_connections = 12", 12),
        ("max_queues = 13", 13),
        ("max_line_bytes = 14", 14),
        ("allow_shutdown = false", False),
    ],
)
def test_server_keys(line: str, value: object) -> None:
    """KP-1.4, KP-1.20: every server key; the command line wins."""
    name = line.split(" ", 1)[0]
    assert getattr(parse_config(line).server, name) == value
    normal = getattr(parse_config("").server, name)
    assert normal != value
    mine = normal if normal not in (None, ()) else ("127.0.0.1:9",) if normal == () else 99
    assert getattr(parse_config(line, overrides={name: mine}).server, name) == mine


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_itemz = 1", "max_itemz: there is no such key"),
        ("[default]\nmax_itemz = 1", r"\[default\] max_itemz: there is no such key"),
        ('[queues.orders]\nmax_items = "x"', r"\[queues.orders\] max_items: must be a whole number, not 'x'"),
        ("[queues.q]\nmax_items = true", "max_items: must be a whole number, not True"),
        ("[queues.q]\nmax_items = -1", "max_items: must be a whole number, not -1"),
        ("[queues.q]\nmax_size = 1.5", "max_size: must be bytes"),
        ('[queues.q]\nmax_size = "1k "\nmax_age = "1 year"', "max_age: must be seconds"),
        ("[queues.q]\nmax_age = -1", "max_age: must be seconds"),
        ("[queues.q]\nmax_age = inf", "max_age: must be seconds"),
        ("[queues.q]\nfanout_only = 1", "fanout_only: must be true or false, not 1"),
        ('[queues.q]\nexpire_to_queue = "a/b"', "expire_to_queue: must be the name of a queue"),
        ('[queues.q]\narchive_dir = ""', "archive_dir: must be a folder"),
        ('[queues."a b"]\nmax_items = 1', r"\[queues.a b\]: no queue can have this name"),
        ("[queues]\nq = 1", r"\[queues.q\]: must be a table"),
        ("queues = 1", r"\[queues\]: must be a table"),
        (
            "[default]\ndiscard_old_when_full = true\nmax_items = 0",
            r"\[default\] max_items: with discard_old_when_full",
        ),
        ("[default]\nmax_items = 0\n[queues.q]\ndiscard_old_when_full = true", r"\[queues.q\] max_items: with"),
        ("[default]\ndefault_journal_size = 10", "default_journal_size: must be from 64k to 1G"),
        ("[default]\ndefault_journal_size = '64G'", "default_journal_size: must be from 64k to 1G"),
        ("[queues.q]\nexpire_to_queue = 'q'", r"\[queues.q\] expire_to_queue: leads back to this queue"),
        ("[queues.'q+a']\nerror_to_queue = 'q'", "error_to_queue: leads back to this queue"),
        ("[queues.q]\nexpire_to_queue = 'x'\n[aliases]\nx = ['y']\ny = ['z', 'q']", "expire_to_queue: leads back"),
        ("[queues.q]\nmany_errors_count = 0", "many_errors_count: must be at least 1"),
        ('zookeeper = "x"', "zookeeper: server sets in ZooKeeper are not supported"),
        ("[queues.q]\nwhite_list_client_id_for_enqueue = []", "client ids need Twitter's thrift header"),
        ("[queues.q]\nwhite_list_client_id_for_dequeue = []", "client ids need Twitter's thrift header"),
        ('default_status = "down"', "default_status: must be one of up, writeavoid"),
        ("listen = 5", "listen: must be an address"),
        ("max_connections = 0", "max_connections: must be at least 1"),
        ("max_line_bytes = 0", "max_line_bytes: must be at least 1"),
        ("max_line_bytes = 65537", "max_line_bytes: must be at most 65536: a client may send no more ahead"),
        ('[aliases]\na = ["b"]\nb = ["c"]\nc = ["a"]', "leads back to itself"),
        ('[aliases]\na = ["a"]', r"\[aliases\] a: leads back to itself"),
        ("[aliases]\na = []", r"\[aliases\] a: must be a list of queues"),
        ('[aliases]\na = ["~"]', r"\[aliases\] a: must be the name of a queue"),
        ('[aliases]\n"~" = ["a"]', r"\[aliases\] ~: no queue can have this name"),
        ("= 5", "no TOML"),
        (f"max_queues = {'9' * 5000}", "no TOML: Exceeds the limit"),
        ("a = " + "[" * 5000, "nested too deep"),
        ("[aliases]\n" + "".join(f"a{at} = ['a{at + 1}']\n" for at in range(3000)), "chain of aliases is too long"),
        ("listen = []", "listen: there is no address"),
        ("listen = ''", "listen: must be an address"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    """KP-1.14, KP-1.15, KP-1.16, KP-1.17, KP-1.28, KP-1.31, KP-1.41: an unknown key, a wrong type, KS-B9: an alias
    that leads back to itself, keys that are not taken over.
    """
    with pytest.raises(ConfigError, match=message) as raised:
        parse_config(text)
    assert "\n" not in str(raised.value)


def test_inheritance() -> None:
    """KP-1.13: built in, [default], the parent queue, the child; what is said explicitly wins at each level."""
    config = parse_config(
        """
        [default]
        max_items = 1
        max_age = 10
        [queues.orders]
        max_items = 2
        max_size = 100
        [queues."orders+audit"]
        max_size = 50
        """,
        sync_journal=7.0,
    )
    assert (config.for_queue(b"other").max_items, config.for_queue(b"other").max_size) == (1, None)
    assert (config.for_queue(b"orders").max_items, config.for_queue(b"orders").max_age) == (2, 10.0)
    audit = config.for_queue(b"orders+audit")
    assert (audit.max_items, audit.max_size, audit.max_age, audit.sync_journal) == (2, 50, 10.0, 7.0)
    assert config.for_queue(b"orders+new").max_size == 100


def test_keys_without_effect() -> None:
    """KP-1.15, KP-1.46: max_journal_size, min_journal_compact_delay, disable_aggressive_rewrites, enable_trace:
    taken, a warning.
    """
    for key in ("max_journal_size", "min_journal_compact_delay", "disable_aggressive_rewrites", "enable_trace"):
        assert f"{key} has no effect" in parse_config(f"[default]\n{key} = 1").warnings[0]
    hidden = parse_config('[aliases]\nq = ["a"]\n[queues.q]\nmax_items = 1')
    assert hidden.warnings == ["the alias q hides the queue of that name"]


def test_dump() -> None:
    """KP-3.17."""
    dumped = dict(queue('max_age = "30m"\nmax_size = "1k"\ndiscard_old_when_full = true\nexpire_to_queue = "x"').dump())
    assert dumped["max_age"] == "1800"
    assert dumped["max_size"] == "1024"
    assert dumped["discard_old_when_full"] == "true"
    assert dumped["expire_to_queue"] == "x"
    assert dumped["sync_journal"] == "0.1"
    assert dumped["max_items"] == "none"


def test_what_waits_for_the_next_start() -> None:
    """KP-1.19."""
    assert changes_at_next_start(queue("keep_journal = false"), queue("max_items = 1")) == ["keep_journal"]
    both = changes_at_next_start(queue('default_journal_size = "1M"\narchive_dir = "a"'), queue("sync_journal = 0"))
    assert both == ["default_journal_size", "archive_dir", "sync_journal"]


def test_many_names_do_not_grow_it() -> None:
    config = parse_config("max_queues = 10")
    for number in range(1000):
        config.for_queue(b"%d" % number)
    assert len(config._known) <= 21


def test_a_target_of_all_queues_gives_nothing_to_itself() -> None:
    """KP-1.16: expire_to_queue: what is said in [default] counts for the others."""
    config = parse_config("[default]\nexpire_to_queue = 'late'\nmax_age = 0")
    assert config.for_queue(b"q").expire_to_queue == b"late"
    assert config.for_queue(b"late").expire_to_queue is None
    assert config.for_queue(b"late+a").expire_to_queue is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_open_transactions": "x"}, "max_open_transactions: must be a whole number"),
        ({"sync_journal": -1}, "sync_journal: must be seconds"),
        ({"sync_journal": "foo"}, "sync_journal: must be seconds"),
        ({"default_status": "down"}, "default_status: must be one of"),
        ({"max_queues": 0}, "max_queues: must be at least 1"),
        ({"max_line_bytes": 100_000}, "max_line_bytes"),
        ({"listen": ""}, "listen: must be an address"),
        ({"max_itemz": 1}, "max_itemz: there is no such key"),
    ],
)
def test_options_of_the_server_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KestrelServer(**options)
