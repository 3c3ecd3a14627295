"""Limits of readers: which puts may be refused, and which must be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kestrelpy import FullPolicy, ItemTooLarge, LagPolicy, QueueFull, ReaderConfig
from tests.use.use_model import Put, ReaderModel
from tests.use.use_operations import is_here

if TYPE_CHECKING:
    from tests.use.use_world import Opened, World


LOOKS = 5
"""Seconds after which a writer must have seen what readers others have made."""


class Limits:
    def __init__(self, world: World) -> None:
        self.world = world

    def check_refused(self, opened: Opened, puts: list[Put], error: BaseException, nested: int) -> None:
        w = self.world
        if isinstance(error, ItemTooLarge):
            largest = max(len(put.data) for put in puts)
            # A batch is one record, and is refused as a whole where it does not fit a segment.
            w.require(largest > opened.queue.max_item_bytes or len(puts) > 1, f"{error!r} for {largest} bytes")
        if not isinstance(error, QueueFull) or nested != w.nested or opened.model.damaged:
            return
        if error.reader is None and w.ships.may_refuse(opened):
            return
        if error.reader is None and opened.options.get("max_journal_bytes") is not None:
            self._check_no_room(opened, puts, error)
            return
        model = opened.model
        name = str(error.reader)
        w.saw("a put is refused")
        short = name.removeprefix(model.name).removeprefix("+")
        reader = model.readers.get(short)
        lately = any(w.elapsed - each.made_at <= LOOKS for each in model.readers.values() if each.exists)
        if reader is None and (model.unsure or w.depth or (not short and lately)):
            # One that was made elsewhere may have the default reader's place, and the writer looks now and then; or it
            # is being made around this call.
            return
        if reader is None:
            raise w.fail(f"a put is refused by reader {name!r}, which there is not: {sorted(model.readers)}")
        config = opened.config(short)
        if "too far behind" in str(error):
            self._check_lag(reader, config, error)
            return
        by_checkpoint = reader not in w.open_readers(model.writer) or not is_here(model.writer, reader)
        done = reader.saved - reader.saved_optional - reader.moved if by_checkpoint else reader.done
        left = [put for put in model.stored if put not in done]
        count = len(left) + len(model.flying) + len(puts)
        doubtful = model.holes
        full = (config.max_items is not None and count > config.max_items) or (
            config.max_bytes is not None and sum(len(put.data) for put in [*left, *puts[:-1]]) >= config.max_bytes
        )
        what = f"a put of {len(puts)} is refused by {name!r}, which has {len(left)} items, of {config.max_items}"
        stale = by_checkpoint and w.trouble.fired  # a place that can't be read now counts as it was
        w.require(full or doubtful or model.flying or stale, what)

    def _check_no_room(self, opened: Opened, puts: list[Put], error: BaseException) -> None:
        """The journal, with these items, would be larger than it may be; or they are a batch that never fits."""
        limit = opened.options["max_journal_bytes"]
        size = sum(len(put.data) + 40 for put in puts) + 400
        stats = opened.queue.stats()
        what = f"{error!r} for {size} bytes at most, and the journal has {stats.journal_bytes} of {limit}"
        self.world.require(stats.journal_bytes + size > limit or size > limit // 2, what)
        self.world.require(stats.journal_bytes <= limit or stats.rotations == 0 or bool(opened.tail_id), what)
        self.world.saw("the journal has no room")

    def _check_lag(self, reader: ReaderModel, config: ReaderConfig, error: BaseException) -> None:
        """All that comes after the last thing that the reader has surely not done is more than it may be behind."""
        w = self.world
        done = reader.done & reader.saved - reader.saved_optional - reader.moved
        first_id = min((put.id for put in reader.queue.stored if put not in done), default=0)
        behind = sum(len(put.data) for put in reader.queue.stored if put.id >= first_id > 0)
        w.require(
            config.lag_policy is LagPolicy.REFUSE and config.max_lag_bytes is not None,
            f"{error!r}, and its configuration says nothing of it",
        )
        doubtful = reader.queue.holes or reader.queue.flying or w.trouble.fired
        w.require(bool(doubtful) or behind > (config.max_lag_bytes or 0), f"{error!r}; it is {behind} bytes behind")
        w.saw("a reader is too far behind")

    def check_accepted(self, opened: Opened, puts: list[Put], nested: int) -> None:
        w, model = self.world, opened.model
        if nested != w.nested or model.flying or model.damaged:
            return
        if {"open_reader", "reader"} & set(w.stack[:-1]):
            return  # in the middle of who takes a place over
        for reader in model.readers.values():
            config = opened.config(reader.name)
            if config.full_policy is FullPolicy.DROP_OLDEST or (config.max_items is None and config.max_bytes is None):
                continue
            if reader.may_have_name or not self._is_known(opened, reader):
                continue
            now_ms = w.now_ms
            sure = [put for put in model.stored if put not in reader.done and put not in reader.optional]
            if model.expires or (reader.config is not None and reader.config.max_age is not None):
                sure = [put for put in sure if put in reader.open or not reader.is_expired(put, now_ms)]
            if reader.settling:
                continue
            self._check_bytes(reader, config, puts, sure)
            what = f"{len(puts)} items are accepted, and {reader.full_name} has {len(sure)}, of {config.max_items}"
            w.require(config.max_items is None or len(sure) <= config.max_items, what)

    def _check_bytes(self, reader: ReaderModel, config: ReaderConfig, puts: list[Put], sure: list[Put]) -> None:
        """Bytes may be overshot by one item, but for a batch to a reader that is empty."""
        before = [put for put in sure if put not in puts]
        size = sum(len(put.data) for put in before) + sum(len(put.data) for put in puts[:-1])
        if config.max_bytes is not None and before and any(put in sure for put in puts):
            what = f"{len(puts)} items are accepted, with {size} bytes before the last, of {config.max_bytes}"
            self.world.require(size < config.max_bytes, f"{reader.full_name}: {what}")

    def _is_known(self, opened: Opened, reader: ReaderModel) -> bool:
        """Whether the writer must know of the reader: it is open there, or was made some rounds ago."""
        if is_here(reader.queue.writer, reader):
            return True
        if self.world.trouble.fired:
            return False  # the writer may have been unable to look
        return reader.exists and self.world.elapsed - reader.made_at > LOOKS
