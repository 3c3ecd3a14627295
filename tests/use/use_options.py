"""Every option and policy, in combination, as the swarm allows."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from kestrelpy import FullPolicy, LagPolicy, ReaderConfig, codecs

if TYPE_CHECKING:
    from tests.use.use_world import Process, World

READERS = ("", "r", "s", "t")
ODD_QUEUE: tuple[dict[str, Any], ...] = (
    {"segment_bytes": 1e5},
    {"segment_bytes": 4096.0},
    {"checkpoint_interval": float("nan")},
    {"sync": float("nan")},
    {"sync": "alway"},
    {"max_item_bytes": 0},
    {"inbox_interval": float("nan")},
    {"on_corruption": "ignore"},
    {"segment_bytes": True},
)
ODD_READER: tuple[dict[str, Any], ...] = (
    {"max_age": float("inf")},
    {"max_age": float("nan")},
    {"max_age": 1e306},
    {"max_items": float("nan")},
    {"max_bytes": float("inf")},
    {"memory_bytes": 0},
    {"max_idle": float("inf")},
    {"max_expire_sweep": 0},
)


def reader_config(w: World, rng: random.Random, process: Process, queue: str) -> ReaderConfig | None:
    """A configuration for readers of ``queue``; ``None`` if what was drawn is refused, as it should be."""
    has = w.swarm.options
    options: dict[str, Any] = {"memory_bytes": rng.choice((1, 2000)) if "small memory" in has else 1 << 20}
    if "limits" in has and rng.random() < 0.7:
        options["max_items"] = rng.choice((1, 2, 3) if "tiny limits" in has else (2, 5, 20))
    if "bytes limit" in has and rng.random() < 0.5:
        options["max_bytes"] = rng.choice((100, 1000, 5000))
    policies = [FullPolicy.REFUSE]
    if "drop oldest" in has:
        policies += [FullPolicy.DROP_OLDEST] * 3
    if "block" in has:
        policies += [FullPolicy.BLOCK] * 3
    options["full_policy"] = rng.choice(policies)
    if "max_age" in has and rng.random() < 0.5:
        options["max_age"] = rng.choice((0.5, 2.0, 60.0))
    if rng.random() < 0.2:
        options["max_idle"] = rng.choice((0.0, 1.0))
    if "hooks" in has:
        for name in ("on_expired", "on_abort", "on_delivery", "on_timeout"):
            if rng.random() < (0.8 if "hooks" in w.swarm.lean else 0.4):
                options[name] = w.hooks.make(name, process)
    if {"lag warns", "lag refuses"} & has and rng.random() < 0.7:
        options["max_lag_bytes"] = rng.choice((500, 3000, 20_000))
        if "lag refuses" in has:
            options["lag_policy"] = LagPolicy.REFUSE
    if "odd options" in has and rng.random() < 0.3:
        options |= rng.choice(ODD_READER)
    options |= w.graves.options(rng, process, queue) | w.skips.options(rng)
    try:
        return ReaderConfig(**options)
    except (ValueError, TypeError):
        w.saw("an odd option of a reader is refused")
        return None


def queue_options(w: World, rng: random.Random, process: Process, queue: str) -> dict[str, Any]:
    has = w.swarm.options
    modes: list[float | str] = [0.1]
    if "always" in has:
        modes += ["always"] * 3
    if "never" in has:
        modes += ["never"] * 2
    options: dict[str, Any] = {
        "sync": rng.choice(modes),
        "segment_bytes": rng.choice((4096, 4096, 4096, 16384)),
        "checkpoint_interval": rng.choice((1.0, 1.0, 0.2)),
        "inbox_interval": rng.choice((0.5, 0.1, 3600.0, None)),
    }
    if "archive" in has:
        options["archive_dir"] = "/queues" if "archive is the folder" in has and rng.random() < 0.3 else "/archive"
    options["odd"] = options.get("archive_dir") == "/queues"
    if "codec" in has:
        options["codec"] = codecs.UTF8
    if "quarantine" in has and rng.random() < 0.5:
        options["on_corruption"] = "quarantine"
    configs = {name: reader_config(w, rng, process, queue) for name in READERS[1:] if rng.random() < 0.5}
    options["readers"] = {name: config for name, config in configs.items() if config is not None}
    options["default_reader"] = reader_config(w, rng, process, queue)
    if "kept" in has and rng.random() < 0.7:
        options["keep_bytes"] = rng.choice((0, 9000, 1 << 40))
        options["keep_for"] = rng.choice((None, 0.0, 30.0))
    if "journal limit" in has and rng.random() < 0.7:
        options["max_journal_bytes"] = rng.choice((2, 3, 10)) * options["segment_bytes"]
    if "odd options" in has and rng.random() < 0.15:
        options |= rng.choice(ODD_QUEUE)
        options["odd"] = True
    return options
